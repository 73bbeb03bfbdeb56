#include <cmath>
#include <cstdlib>
#include <algorithm>
#include <cstring>
#include <tuple>

#include "check.h"
#include "quire_cpu.h"

namespace {

struct Shape {
  int64_t heads, kv_heads, head_size, block_size;
};

// One layer's cache with sequences written through the kernel, blocks in reverse order, NaN where nothing was written.
struct Layer {
  Shape shape;
  int32_t dtype, cache_dtype;
  int64_t page, block, num_blocks, width;
  std::vector<int64_t> lengths;
  std::vector<std::vector<float>> qkv;  // [length, (heads + 2 kv_heads) head_size], as rounded to dtype
  std::vector<int32_t> tables;
  std::vector<float> slopes, sinks;  // of each head, or none
  std::vector<float> key_scales, value_scales;  // of each kv head, or none
  char* cache;

  // `between`: elements of other layers between two blocks.
  Layer(Shape shape, int32_t dtype, int32_t cache_dtype, const std::vector<int64_t>& lengths, int64_t between = 0)
      : shape(shape), dtype(dtype), cache_dtype(cache_dtype), lengths(lengths) {
    page = qr_cache_page(cache_dtype, shape.block_size, shape.head_size);
    block = shape.kv_heads * page + between;
    width = 0;
    for (int64_t length : lengths) width = std::max(width, (length + shape.block_size - 1) / shape.block_size);
    num_blocks = width * int64_t(lengths.size()) + 1;
    const int64_t element = cache_dtype == QR_FLOAT32 ? 4 : is_scaled() ? 1 : 2;
    const int64_t bytes = 2 * num_blocks * block * element;
    cache = aligned_zeros(bytes + 128);
    std::memset(cache, 0xff, size_t(bytes));
    for (size_t r = 0; r < lengths.size(); ++r) {
      for (int64_t i = 0; i < width; ++i) tables.push_back(int32_t(num_blocks - 1 - int64_t(r) * width - i));
      qkv.push_back(decode(encode(random_floats(lengths[r] * columns()), dtype), dtype));
    }
  }
  ~Layer() { std::free(cache); }
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;

  int64_t columns() const { return (shape.heads + 2 * shape.kv_heads) * shape.head_size; }

  struct Work {
    size_t sequence;
    int64_t begin, end;
  };

  // Write and attend to these tokens in one step; [tokens, heads * head_size] as floats.
  std::vector<float> attend(const std::vector<Work>& work, float soft_cap, int64_t window) {
    std::vector<float> values;
    std::vector<int64_t> positions, slots;
    std::vector<int32_t> starts{0}, seq_lens, step_tables;
    for (const Work& w : work) {
      const std::vector<float>& own = qkv[w.sequence];
      values.insert(values.end(), own.begin() + w.begin * columns(), own.begin() + w.end * columns());
      const int32_t* table = tables.data() + int64_t(w.sequence) * width;
      for (int64_t p = w.begin; p < w.end; ++p) {
        positions.push_back(p);
        slots.push_back(table[p / shape.block_size] * shape.block_size + p % shape.block_size);
      }
      starts.push_back(int32_t(positions.size()));
      seq_lens.push_back(int32_t(w.end));
      step_tables.insert(step_tables.end(), table, table + width);
    }
    std::vector<char> data = encode(values, dtype);
    const auto tokens = int64_t(positions.size());
    std::vector<char> query(size_t(tokens * shape.heads * shape.head_size) * (dtype == QR_FLOAT32 ? 4 : 2));
    std::vector<char> out(query.size());
    CHECK(qr_rope_and_cache(query.data(), data.data(), dtype, positions.data(), nullptr, nullptr, nullptr, cache,
                            cache_dtype, num_blocks, shape.block_size, page, block, slots.data(), tokens, shape.heads,
                            shape.kv_heads, shape.head_size, 0, 0, 1e-6f, given(key_scales), given(value_scales)) == QR_OK);
    CHECK(qr_paged_attention(out.data(), dtype, query.data(), dtype, cache, cache_dtype, num_blocks, shape.block_size,
                             page, block, starts.data(), seq_lens.data(), int64_t(work.size()), step_tables.data(), width,
                             shape.heads, shape.kv_heads, shape.head_size, 0.2f, soft_cap, window,
                             slopes.empty() ? nullptr : slopes.data(), sinks.empty() ? nullptr : sinks.data()) == QR_OK);
    return decode(out, dtype);
  }

  // Sinks far below, among and far above the scores; slopes that hide what is far away, and one of 0.
  void add_biases(bool has_slopes, bool has_sinks) {
    const float kSinks[] = {-300.0f, 0.5f, 4.0f, 300.0f, -2.0f};
    for (int64_t h = 0; h < shape.heads; ++h) {
      if (has_slopes) slopes.push_back(h % 4 == 3 ? 0.0f : std::exp2(-float(h % 8)));
      if (has_sinks) sinks.push_back(kSinks[h % 5]);
    }
  }

  bool is_scaled() const { return cache_dtype == QR_CACHE_INT8 || cache_dtype == QR_CACHE_FLOAT8; }
  static const float* given(const std::vector<float>& scales) { return scales.empty() ? nullptr : scales.data(); }

  // Some of which are too small for the largest numbers.
  void add_scales() {
    for (int64_t h = 0; h < shape.kv_heads; ++h) {
      key_scales.push_back(h % 2 == 0 ? 0.01f : 0.003f);
      value_scales.push_back(h % 2 == 0 ? 0.002f : 0.02f);
    }
  }

  // What a cache of 8 bits multiplies a head by, and what its codes are multiplied by; given 0: by its largest magnitude.
  struct Scale {
    float times;
    double unit;
  };
  Scale scale_of(const float* head, float given) const {
    if (!is_scaled()) return {1, 1};
    if (given > 0) return {1 / given, given};
    const float top = cache_dtype == QR_CACHE_INT8 ? 127 : 448;
    float largest = 0;
    for (int64_t d = 0; d < shape.head_size; ++d) largest = std::max(largest, std::fabs(head[d]));
    return {largest > 0 ? top / largest : 0, largest / top};
  }

  // An element of a head as the cache keeps it.
  double kept(float element, Scale scale) const {
    return is_scaled() ? code(element * scale.times) * scale.unit : element;
  }

  // What stands for a number in a cache of 8 bits.
  double code(float x) const {
    if (cache_dtype == QR_CACHE_INT8) return std::nearbyint(std::min(std::max(x, -128.0f), 127.0f));
    const double bounded = std::min(std::max(double(x), -448.0), 448.0);
    const double step = std::ldexp(1.0, bounded == 0 ? -9 : std::max(std::ilogb(bounded), -6) - 3);
    return std::nearbyint(bounded / step) * step;
  }

  // What one head of a token gives each key that it sees, from the window's first to its own.
  std::vector<double> weights_of(size_t sequence, int64_t position, int64_t head, float soft_cap, int64_t window) const {
    const int64_t n = shape.head_size, kv = head / (shape.heads / shape.kv_heads);
    const float* all = qkv[sequence].data();
    const float* query = all + position * columns() + head * n;
    std::vector<double> weights;
    for (int64_t p = window > 0 ? std::max<int64_t>(0, position - window + 1) : 0; p <= position; ++p) {
      const float* key = all + p * columns() + (shape.heads + kv) * n;
      const Scale scale = scale_of(key, key_scales.empty() ? 0 : key_scales[size_t(kv)]);
      double score = 0;
      for (int64_t i = 0; i < n; ++i) score += double(query[i]) * kept(key[i], scale);
      score *= 0.2;
      if (soft_cap > 0) score = soft_cap * std::tanh(score / soft_cap);
      if (!slopes.empty()) score -= double(slopes[size_t(head)]) * double(position - p);
      weights.push_back(std::exp(score));
    }
    return weights;
  }

  // Every `step`th output of a token from the first on: {column, value}. Weights are computed once for each head.
  std::vector<std::pair<int64_t, double>> naive(size_t sequence, int64_t position, int64_t step, float soft_cap,
                                                int64_t window) const {
    const int64_t n = shape.head_size;
    std::vector<std::pair<int64_t, double>> outputs;
    std::vector<double> weights;
    for (int64_t column = 0, of_head = -1; column < shape.heads * n; column += step) {
      const int64_t head = column / n, kv = head / (shape.heads / shape.kv_heads);
      if (head != of_head) weights = weights_of(sequence, position, head, soft_cap, window);
      of_head = head;
      double total = sinks.empty() ? 0 : std::exp(double(sinks[size_t(head)])), sum = 0;
      const int64_t first = position + 1 - int64_t(weights.size());
      for (size_t i = 0; i < weights.size(); ++i) {
        const float* value = qkv[sequence].data() + (first + int64_t(i)) * columns() +
                             (shape.heads + shape.kv_heads + kv) * n;
        total += weights[i];
        sum += weights[i] * kept(value[column % n], scale_of(value, value_scales.empty() ? 0 : value_scales[size_t(kv)]));
      }
      outputs.push_back({column, sum / total});
    }
    return outputs;
  }
};

// Of queries, of the cache.
const std::pair<int32_t, int32_t> kDtypes[] = {{QR_FLOAT32, QR_FLOAT32},     {QR_BFLOAT16, QR_BFLOAT16},
                                               {QR_FLOAT16, QR_FLOAT16},     {QR_FLOAT32, QR_CACHE_INT8},
                                               {QR_BFLOAT16, QR_CACHE_INT8}, {QR_FLOAT32, QR_CACHE_FLOAT8},
                                               {QR_BFLOAT16, QR_CACHE_FLOAT8}, {QR_BFLOAT16, QR_FLOAT32}};
const Shape kShapes[] = {{4, 2, 64, 32}, {2, 2, 128, 16}, {6, 1, 24, 8}, {2, 1, 80, 48}, {40, 1, 16, 5}};

}  // namespace

TEST(attention_matches_naive_loops) {
  for (auto [dtype, cache_dtype] : kDtypes)
    for (const Shape& shape : kShapes)
      for (auto [soft_cap, window] : {std::pair<float, int64_t>{0.0f, 0}, {3.0f, 0}, {0.0f, 19}}) {
        if (!runs_case(7)) continue;
        Layer layer(shape, dtype, cache_dtype, {1, 45, 300}, window > 0 ? 96 : 0);
        if (layer.is_scaled() && soft_cap > 0) layer.add_scales();
        std::vector<float> out = layer.attend({{0, 0, 1}, {1, 0, 45}, {2, 0, 300}}, soft_cap, window);
        const int64_t width = shape.heads * shape.head_size;
        for (auto [sequence, position, row] :
             {std::tuple<size_t, int64_t, int64_t>{0, 0, 0}, {1, 0, 1}, {1, 44, 45}, {2, 17, 63}, {2, 299, 345}})
          for (auto [column, want] : layer.naive(sequence, position, 7, soft_cap, window)) {
            const float got = out[size_t(row * width + column)];
            CHECK(std::fabs(got - want) <= (dtype == QR_FLOAT32 ? 1e-5 : dtype == QR_BFLOAT16 ? 0.02 : 0.002),
                  "dtype %d cache %d head size %ld block %ld cap %g window %ld: [%ld, %ld] %g, not %g", dtype,
                  cache_dtype, long(shape.head_size), long(shape.block_size), double(soft_cap), long(window),
                  long(row), long(column), double(got), want);
          }
      }
}

TEST(slopes_and_sinks_match_naive_loops_in_any_chunk) {
  for (auto [dtype, cache_dtype] : kDtypes)
    for (const Shape& shape : kShapes)
      for (int biases : {1, 2, 3})
        for (auto [soft_cap, window] : {std::pair<float, int64_t>{0.0f, 0}, {3.0f, 70}}) {
          if (!runs_case(37)) continue;
          const int64_t length = 530, width = shape.heads * shape.head_size;
          Layer layer(shape, dtype, cache_dtype, {length, 100});
          layer.add_biases(biases % 2 != 0, biases / 2 != 0);
          const std::vector<float> whole = layer.attend({{0, 0, length}}, soft_cap, window);
          for (int64_t position : {0, 1, 99, 300, 529})
            for (auto [column, want] : layer.naive(0, position, 5, soft_cap, window)) {
              const float got = whole[size_t(position * width + column)];
              CHECK(std::fabs(got - want) <= (dtype == QR_FLOAT32 ? 1e-5 : dtype == QR_BFLOAT16 ? 0.02 : 0.002),
                    "dtype %d cache %d head size %ld block %ld cap %g window %ld biases %d: [%ld, %ld] %g, not %g",
                    dtype, cache_dtype, long(shape.head_size), long(shape.block_size), double(soft_cap), long(window),
                    biases, long(position), long(column), double(got), want);
            }
          for (int32_t threads : {1, 3}) {
            qr_init(qr_isa_in_use(), threads);
            for (auto [begin, end] : {std::pair<int64_t, int64_t>{0, 16}, {37, 38}, {250, 270}, {529, 530}}) {
              const std::vector<float> part = layer.attend({{1, 0, 100}, {0, begin, end}}, soft_cap, window);
              CHECK(std::memcmp(part.data() + 100 * width, whole.data() + begin * width,
                                size_t((end - begin) * width) * 4) == 0,
                    "dtype %d cache %d head size %ld window %ld biases %d threads %d tokens %ld to %ld", dtype,
                    cache_dtype, long(shape.head_size), long(window), biases, threads, long(begin), long(end));
            }
          }
          qr_init(qr_isa_in_use(), 2);
        }
}

TEST(a_token_has_the_same_bits_in_prefill_chunks_and_decode) {
  for (auto [dtype, cache_dtype] : kDtypes)
    for (const Shape& shape : kShapes)
      for (int64_t window : {0, 70}) {
        if (!runs_case(17)) continue;
        const int64_t length = is_emulated() ? 290 : 530, width = shape.heads * shape.head_size;
        Layer layer(shape, dtype, cache_dtype, {length, 100});
        const std::vector<float> whole = layer.attend({{0, 0, length}}, 0.0f, window);
        // The neighbour: all of its tokens beside large chunks, its last ones beside small chunks, of which there are many.
        layer.attend({{1, 0, 100}}, 0.0f, window);
        for (int32_t threads : {1, 3}) {
          qr_init(qr_isa_in_use(), threads);
          for (int64_t chunk : {1, 3, 16, 100, 257}) {
            const int64_t beside = chunk <= 16 ? 10 : 100;
            for (int64_t begin = 0; begin < length; begin += chunk) {
              if (!runs_case(7)) continue;
              if (begin % (chunk == 1 ? 37 : chunk == 3 ? 15 : chunk) != 0) continue;  // of the many small ones, some
              const int64_t end = std::min(length, begin + chunk);
              const std::vector<float> part = layer.attend({{1, 100 - beside, 100}, {0, begin, end}}, 0.0f, window);
              CHECK(std::memcmp(part.data() + beside * width, whole.data() + begin * width,
                                size_t((end - begin) * width) * 4) == 0,
                    "dtype %d cache %d head size %ld block %ld window %ld threads %d tokens %ld to %ld", dtype,
                    cache_dtype, long(shape.head_size), long(shape.block_size), long(window), threads, long(begin),
                    long(end));
            }
          }
        }
        qr_init(qr_isa_in_use(), 2);
      }
}

// Sums of integers are exact, and the rest is the same in vectors of one width.
TEST(an_int8_cache_gives_the_same_bits_by_vectors_and_by_tiles) {
  const int32_t own = qr_isa_in_use();
  if (own < QR_AVX512_VNNI || own > QR_AMX) return;
  for (const Shape& shape : kShapes)
    for (int64_t window : {0, 70}) {
      Layer layer(shape, QR_BFLOAT16, QR_CACHE_INT8, {300, 45});
      const std::vector<float> whole = layer.attend({{0, 0, 300}, {1, 0, 45}}, 0.0f, window);
      qr_init(QR_AVX512_VNNI, 2);
      const std::vector<float> by_vectors = layer.attend({{0, 0, 300}, {1, 0, 45}}, 0.0f, window);
      qr_init(own, 2);
      CHECK(std::memcmp(whole.data(), by_vectors.data(), whole.size() * 4) == 0, "head size %ld block %ld window %ld",
            long(shape.head_size), long(shape.block_size), long(window));
    }
}
