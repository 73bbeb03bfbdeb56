"""Choice of instruction set, the thread pool seen from Python, and bits that must not follow the number of threads."""

import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch

from quire.errors import ConfigError
from quire.ops.backends import ops_of
from quire.ops.cpu import library

if not library.available():
    pytest.skip(str(library.unavailable_reason()), allow_module_level=True)

from quire.ops.contracts.operands import LinearWeight
from quire.ops.cpu.products.gemm import linear
from quire.ops.cpu.products.packing import pack_linear
from tests.ops.implementations import rand

RUNS = library.isas()


def in_child(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture
def weight() -> LinearWeight:
    return pack_linear([rand(300, 200)], dtype=torch.bfloat16)


@pytest.mark.parametrize("isa", RUNS)
def test_a_lower_instruction_set_can_be_forced(isa: str) -> None:
    code = "from quire.ops.cpu import library; print(library.isa())"
    assert in_child(code, QUIRE_CPU_ISA=isa) == isa


@pytest.mark.parametrize("isa", RUNS)
def test_every_instruction_set_computes_the_same_within_rounding(isa: str) -> None:
    code = (
        "import torch; from quire.ops.cpu.products.gemm import linear;"
        "from quire.ops.cpu.products.packing import pack_linear;"
        "from tests.ops.implementations import rand;"
        "out = linear(rand(5, 200, dtype=torch.bfloat16), pack_linear([rand(64, 200)], dtype=torch.bfloat16),"
        "             out_dtype=torch.float32);"
        "print(*out.flatten().tolist())"
    )
    values = torch.tensor([float(text) for text in in_child(code, QUIRE_CPU_ISA=isa).split()])
    x, dense = rand(5, 200, dtype=torch.bfloat16), rand(64, 200).bfloat16()
    assert torch.allclose(values.view(5, 64), x.float() @ dense.float().T, atol=1e-4)


def test_a_machine_that_has_no_kernels_is_not_told_to_build_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "paths", list)
    assert library.BUILD_COMMAND in str(library._open.__wrapped__())
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    reason = "native kernels exist for Linux on x86_64 and Linux on aarch64 only; this is Linux on riscv64"
    assert library._open.__wrapped__() == reason


def test_an_instruction_set_beyond_the_machine_is_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CPU_ISA", "amx")
    reason = library._wanted_isa(("avx2", "avx_vnni"))
    assert reason == "QUIRE_CPU_ISA=amx is not among what this machine runs: avx2, avx_vnni"


def test_an_instruction_set_that_a_better_one_does_not_contain_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CPU_ISA", "avx_vnni")
    assert isinstance(library._wanted_isa(("avx2", "avx512")), str)


def test_the_best_instruction_set_is_taken_and_known_to_the_library() -> None:
    assert tuple(sorted(RUNS, key=library.ISA_NAMES.index)) == RUNS
    assert in_child("from quire.ops.cpu import library; print(library.isa())", QUIRE_CPU_ISA="auto") == RUNS[-1]


@pytest.mark.parametrize("isa", library.ISA_NAMES[1:])
def test_the_library_refuses_what_the_machine_does_not_run(isa: str) -> None:
    number = library.ISA_NAMES.index(isa)
    status = in_child(f"from quire.ops.cpu import library; print(library.load().qr_init({number}, 1))")
    assert int(status) == (0 if isa in RUNS else library.UNSUPPORTED)


@pytest.mark.parametrize("isa", library.X86_ISAS)
def test_an_instruction_set_of_another_kind_of_processor_is_refused(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CPU_ISA", isa)
    runs = ("neon", "neon_dotprod")
    assert library._wanted_isa(runs) == f"QUIRE_CPU_ISA={isa} is not among what this machine runs: neon, neon_dotprod"


def test_a_lower_instruction_set_of_arm_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CPU_ISA", "neon")
    assert library._wanted_isa(("neon", "neon_bf16")) == library.ISA_NAMES.index("neon")


def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CPU_ISA", "sse9")
    with pytest.raises(ConfigError, match="QUIRE_CPU_ISA"):
        library._wanted_isa(("avx2",))


def test_asking_whether_kernels_run_imports_no_torch() -> None:
    code = "import sys; from quire.ops.cpu import library; library.available(); print('torch' in sys.modules)"
    assert in_child(code) == "False"


def test_threads_change_no_bit(weight: LinearWeight) -> None:
    x, before = rand(70, 200, dtype=torch.bfloat16), library.num_threads()
    expected = linear(x, weight)
    try:
        for count in (1, 2, 3, 7):
            library.set_num_threads(count)
            assert library.num_threads() == count
            for _ in range(20):
                assert torch.equal(linear(x, weight), expected)
    finally:
        library.set_num_threads(before)


def test_threads_of_python_may_call_at_the_same_time(weight: LinearWeight) -> None:
    x = rand(70, 200, dtype=torch.bfloat16)
    expected, wrong = linear(x, weight), []

    def work() -> None:
        for _ in range(200):
            if not torch.equal(linear(x, weight), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_child_computes() -> None:
    code = (
        "import os, torch; from quire.ops.cpu.products.gemm import linear; from quire.ops.cpu import library;"
        "from quire.ops.cpu.products.packing import pack_linear;"
        "library.set_num_threads(2); w = pack_linear([torch.ones(512, 256)], dtype=torch.bfloat16);"
        "x = torch.ones(1, 256, dtype=torch.bfloat16); linear(x, w); pid = os.fork();"
        "ok = bool((linear(x, w) == 256).all());"
        "pid or os._exit(0 if ok else 1); print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), ok)"
    )
    assert in_child(code) == "0 True"


def test_an_idle_pool_uses_no_cpu(weight: LinearWeight) -> None:
    def used_s() -> float:
        linear(rand(70, 200, dtype=torch.bfloat16), weight)
        time.sleep(0.01)
        before = time.process_time()
        time.sleep(0.2)
        return time.process_time() - before

    assert any(used_s() < 0.02 for _ in range(5)), "threads of other tests may run now and then"


def test_a_busy_neighbour_does_not_stop_the_pool() -> None:
    """More threads than cores, all but one starved: pieces are taken by whoever runs, nobody waits by spinning."""
    weight, before = pack_linear([rand(2048, 1024)], dtype=torch.bfloat16), library.num_threads()
    x = rand(1, 1024, dtype=torch.bfloat16)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(len(os.sched_getaffinity(0)))]
    try:
        library.set_num_threads(4)
        start = time.perf_counter()
        for _ in range(50):
            linear(x, weight)
        assert time.perf_counter() - start < 5
    finally:
        library.set_num_threads(before)
        for process in busy:
            process.kill()
            process.wait()


def test_engines_with_different_numbers_of_threads_do_not_meet() -> None:
    """By turns in one thread, then at once in two: each keeps its number, its pool and its tokens."""
    code = (
        "import threading; from quire import LLM, SamplingParams; from quire.ops.cpu import library;"
        "engines = [LLM(num_threads=n, max_model_len=64, max_num_seqs=4, use_tqdm_on_load=False) for n in (1, 2, 3)];"
        "params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True);"
        "ask = lambda llm: llm.generate(['import os', 'def f('], params);"
        "tokens = lambda outputs: [o.outputs[0].token_ids for o in outputs];"
        "expected = tokens(ask(engines[0])); seen = [];\n"
        "for _ in range(3):\n"
        "  for n, llm in enumerate(engines, 1):\n"
        "    seen.append(tokens(ask(llm)) == expected and library.num_threads() == n)\n"
        "def work(n, llm):\n"
        "  for _ in range(10): seen.append(tokens(ask(llm)) == expected and library.num_threads() == n)\n"
        "threads = [threading.Thread(target=work, args=item) for item in enumerate(engines, 1)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]; print(len(seen), all(seen))"
    )
    assert in_child(code).splitlines()[-1] == "39 True"


@pytest.mark.skipif(sys.platform != "linux", reason="bursts need timers of threads")
def test_a_thread_that_gives_way_leaves_its_core_often() -> None:
    def sleeps(prepare: Callable[[], None]) -> int:
        found = []

        def run() -> None:
            prepare()
            began, before = time.thread_time(), resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
            while time.thread_time() < began + 0.05:
                pass
            found.append(resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()  # nobody else wants the interpreter's lock
        return found[0]

    assert sleeps(lambda: None) < 10
    assert sleeps(ops_of("cpu").give_way) > 25
    assert sleeps(lambda: None) < 10
