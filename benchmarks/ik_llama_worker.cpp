// ik_llama.cpp behind numbers on standard input: `ik_llama_worker MODEL THREADS`, with weights repacked while loading.
//
// Prints `ready`. Then each line `OUTPUT BATCH LENGTH TOKEN...` holds BATCH prompts of LENGTH tokens, one after the
// other; the answer is a line of BATCH * OUTPUT tokens, those of the first prompt first, chosen greedily.
// Batches are those of `llamacpp` in peer_worker.py: all sequences in each step, prompts in steps of up to 2048 tokens.

#include <llama.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

constexpr int max_sequences = 32, max_length = 1088, max_batch = 2048;

struct Engine {
    llama_context * context;
    int vocab;
    llama_batch batch = llama_batch_init(max_batch, 0, 1);

    // Adds tokens of one sequence to the step; the last of them gets logits.
    void add(int sequence, int first_position, const int * tokens, int count) {
        for (int i = 0; i < count; i++) {
            const int row = batch.n_tokens++;
            batch.token[row] = tokens[i];
            batch.pos[row] = first_position + i;
            batch.n_seq_id[row] = 1;
            batch.seq_id[row][0] = sequence;
            batch.logits[row] = i == count - 1;
        }
    }

    // Runs the step and appends each sequence's next token to its output.
    void step(std::vector<std::vector<int>> & outputs) {
        if (llama_decode(context, batch) != 0) std::exit(1);
        for (int row = 0; row < batch.n_tokens; row++) {
            if (!batch.logits[row]) continue;
            const float * logits = llama_get_logits_ith(context, row);
            const auto best = std::max_element(logits, logits + vocab) - logits;
            outputs[batch.seq_id[row][0]].push_back(static_cast<int>(best));
        }
        batch.n_tokens = 0;
    }

    std::vector<std::vector<int>> generate(const std::vector<int> & prompts, int length, int output) {
        const int count = static_cast<int>(prompts.size()) / length;
        std::vector<std::vector<int>> outputs(count);
        llama_kv_cache_clear(context);
        for (int sequence = 0; sequence < count; sequence++) {
            if (batch.n_tokens + length > max_batch) step(outputs);
            add(sequence, 0, &prompts[sequence * length], length);
        }
        step(outputs);
        for (int position = length; position < length + output - 1; position++) {
            for (int sequence = 0; sequence < count; sequence++) add(sequence, position, &outputs[sequence].back(), 1);
            step(outputs);
        }
        return outputs;
    }
};

llama_context * load(const char * path, int threads) {
    llama_model_params model_params = llama_model_default_params();
    model_params.use_mmap = false;
    model_params.repack_tensors = true;
    llama_model * model = llama_model_load_from_file(path, model_params);
    if (model == nullptr) std::exit(1);
    llama_context_params params = llama_context_default_params();
    params.n_ctx = max_sequences * max_length;
    params.n_seq_max = max_sequences;
    params.n_batch = max_batch;
    params.n_threads = params.n_threads_batch = threads;
    llama_context * context = llama_init_from_model(model, params);
    if (context == nullptr) std::exit(1);
    return context;
}

}  // namespace

int main(int, char ** argv) {
    llama_context * context = load(argv[1], std::atoi(argv[2]));
    Engine engine{context, llama_n_vocab(llama_get_model(context))};
    std::puts("ready");
    std::fflush(stdout);
    int output, count, length;
    while (std::scanf("%d %d %d", &output, &count, &length) == 3) {
        std::vector<int> prompts(static_cast<size_t>(count) * length);
        for (int & token : prompts) {
            if (std::scanf("%d", &token) != 1) return 1;
        }
        for (const auto & tokens : engine.generate(prompts, length, output)) {
            for (int token : tokens) std::printf("%d ", token);
        }
        std::puts("");
        std::fflush(stdout);
    }
    return 0;
}
