"""Which device an engine runs on: what is here, what was asked for, what other packages bring."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from quire.config.engine import Capabilities
from quire.errors import ConfigError
from quire.platforms import accelerators, cuda, current, rocm
from quire.platforms.cpu import capabilities as of_cpu
from quire.platforms.current import current_capabilities
from quire.platforms.platform import Platform


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    current_capabilities.cache_clear()
    yield
    current_capabilities.cache_clear()


class NVMLError(Exception):
    """As the library's."""


class Driver(SimpleNamespace):
    """What the management library says of a machine with so many GPUs."""

    NVMLError = NVMLError

    def __init__(self, count: int = 1, capability: tuple[int, int] = (9, 0), *, answers: bool = True) -> None:
        super().__init__(count=count, capability=capability, answers=answers, num_open=0)

    def nvmlInit(self) -> None:
        if not self.answers:
            raise NVMLError("Driver Not Loaded")
        self.num_open += 1

    def nvmlShutdown(self) -> None:
        self.num_open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        assert 0 <= index < self.count
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid != "GPU-1234":
            raise NVMLError("Not Found")
        return 1

    def nvmlDeviceGetCudaComputeCapability(self, device: int) -> tuple[int, int]:
        return self.capability

    def nvmlDeviceGetMemoryInfo(self, device: int) -> SimpleNamespace:
        return SimpleNamespace(total=(80 + device) << 30, free=(79 + device) << 30)

    def nvmlDeviceGetName(self, device: int) -> str:
        return f"GPU number {device}"


def with_driver(monkeypatch: pytest.MonkeyPatch, driver: Driver, *, kernels: str | None = None) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver)  # type: ignore[arg-type]
    monkeypatch.setattr(cuda, "find_spec", lambda _: object())
    monkeypatch.setattr(cuda, "why_no_kernels", lambda *_: kernels)
    monkeypatch.setattr(accelerators.metadata, "version", lambda _: "1.0")
    monkeypatch.delenv(cuda.VISIBLE, raising=False)


def test_a_gpu_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    with_driver(monkeypatch, driver)
    found = current_capabilities("cuda")
    assert (found.device_type, found.ops, found.ops_isa) == ("cuda", "triton", "sm_90")
    assert found.total_memory == 80 << 30
    assert found.available_memory == (79 << 30) - accelerators.CONTEXT_BYTES
    assert found.host_memory == of_cpu().total_memory
    assert driver.num_open == 0


def test_a_gpu_whose_kind_was_seen_is_used_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with_driver(monkeypatch, Driver())
    assert current_capabilities().device_type == "cuda"
    assert current.devices()["cuda"] == "can be used"


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0)])
def test_another_gpu_is_used_only_if_asked_for_and_people_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, capability: tuple[int, int]
) -> None:
    with_driver(monkeypatch, Driver(capability=capability))
    (tmp_path / "gpus/0000:01:00.0").mkdir(parents=True)
    monkeypatch.setattr(cuda, "DRIVER", tmp_path)
    assert current_capabilities().device_type == "cpu"
    assert "device cuda is here and is not used: ask for it (device='cuda')" in caplog.text
    assert current.devices()["cuda"].startswith("can be asked for")
    assert current.devices()["cpu"] == "can be used"


@pytest.mark.parametrize(
    ("visible", "name"), [("1", "GPU number 1"), ("1,0", "GPU number 1"), ("GPU-1234", "GPU number 1")]
)
def test_the_first_visible_gpu_is_asked(monkeypatch: pytest.MonkeyPatch, visible: str, name: str) -> None:
    with_driver(monkeypatch, Driver(count=2))
    monkeypatch.setenv(cuda.VISIBLE, visible)
    assert current_capabilities("cuda").name == name


@pytest.mark.parametrize(
    ("driver", "visible", "kernels", "reason"),
    [
        (Driver(count=0), None, None, "there is no NVIDIA GPU"),
        (Driver(), "", None, "leaves no GPU"),
        (Driver(), "-1", None, "leaves no GPU"),
        (Driver(), "7", None, "leaves no GPU"),
        (Driver(), "GPU-9", None, "no NVIDIA driver answers"),
        (Driver(answers=False), None, None, "no NVIDIA driver answers"),
        (Driver(capability=(7, 5)), None, None, "compute capability 7.5; the kernels need 8.0"),
        (Driver(), None, "this build of torch has no support for it", "this build of torch"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, driver: Driver, visible: str | None, kernels: str | None, reason: str
) -> None:
    with_driver(monkeypatch, driver, kernels=kernels)
    if visible is not None:
        monkeypatch.setenv(cuda.VISIBLE, visible)
    with pytest.raises(ConfigError, match=reason):
        current_capabilities("cuda")
    assert current_capabilities().device_type == "cpu"
    assert driver.num_open == 0


def test_a_gpu_that_is_passed_over_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "gpus/0000:01:00.0").mkdir(parents=True)
    monkeypatch.setattr(cuda, "DRIVER", tmp_path)
    monkeypatch.setattr(cuda, "find_spec", lambda _: None)
    assert current_capabilities().device_type == "cpu"
    assert "device cuda is here and is not used: the package nvidia-ml-py" in caplog.text


def test_torch_without_the_device_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(accelerators, "_torch_libraries", lambda: tmp_path)
    assert "has no support for it. Install it so." in str(
        accelerators.why_no_kernels("libtorch_cuda.so", "Install it so.")
    )
    (tmp_path / "libtorch_cuda.so").touch()
    monkeypatch.setattr(accelerators, "find_spec", lambda _: None)
    assert "triton" in str(accelerators.why_no_kernels("libtorch_cuda.so", ""))
    monkeypatch.setattr(accelerators, "find_spec", lambda _: object())
    assert accelerators.why_no_kernels("libtorch_cuda.so", "") is None


def with_nodes(root: Path) -> Path:
    """A processor and two accelerators, as the kernel's files have them."""
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    properties = {0: {"simd_count": 0, "drm_render_minor": 0}}
    properties |= {
        node: {"simd_count": 1216, "gfx_target_version": 90402, "drm_render_minor": 127 + node} for node in (1, 10)
    }
    for node, values in properties.items():
        (nodes / str(node)).mkdir(parents=True)
        lines = "".join(f"{name} {value}\n" for name, value in values.items())
        (nodes / str(node) / "properties").write_text(lines, encoding="ascii")
        card = root / f"sys/class/drm/renderD{values['drm_render_minor']}/device"
        card.mkdir(parents=True, exist_ok=True)
        (card / "mem_info_vram_total").write_text(f"{192 << 30}\n", encoding="ascii")
        (card / "mem_info_vram_used").write_text(f"{node << 30}\n", encoding="ascii")
    return root


@pytest.mark.parametrize(("visible", "used"), [(None, 1), ("1", 10), ("0,1", 1)])
def test_amd_gpus_are_read_from_the_kernels_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str | None, used: int
) -> None:
    monkeypatch.delenv(rocm.VISIBLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(rocm.VISIBLE, visible)
    monkeypatch.setattr(rocm, "why_no_kernels", lambda *_: None)
    monkeypatch.setattr(accelerators.metadata, "version", lambda _: "1.0")
    root = with_nodes(tmp_path)
    assert rocm.why_not(root) is None
    found = rocm.capabilities(root)
    assert (found.device_type, found.ops_isa, found.total_memory) == ("rocm", "gfx942", 192 << 30)
    assert found.available_memory == (192 - used << 30) - accelerators.CONTEXT_BYTES


@pytest.mark.parametrize("visible", ["", "-1", "2", "x"])
def test_amd_gpus_may_be_hidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str) -> None:
    monkeypatch.setenv(rocm.VISIBLE, visible)
    assert rocm.why_not(with_nodes(tmp_path)) == f"{rocm.VISIBLE} leaves no GPU"
    assert rocm.is_present(tmp_path)


def test_a_machine_without_accelerators(tmp_path: Path) -> None:
    assert rocm.why_not(tmp_path) == "there is no AMD GPU that computes"
    assert not rocm.is_present(tmp_path)


class Points:
    """Entry points of an installed package."""

    def __init__(self, name: str, value: object) -> None:
        self.name, self.value = name, value

    def __call__(self, *, group: str, name: str | None = None) -> object:
        assert group == current.GROUP
        if name is None:
            return SimpleNamespace(names={self.name})
        return [SimpleNamespace(load=lambda: self.value)] if name == self.name else []


def test_other_packages_bring_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    def capabilities() -> Capabilities:
        return replace(of_cpu(), name="NPU 1", device_type="npu")

    platform = Platform(why_not=lambda: None, capabilities=capabilities)
    monkeypatch.setattr(current, "entry_points", Points("npu", platform))
    assert current_capabilities().name == "NPU 1"
    current_capabilities.cache_clear()
    assert current_capabilities("npu").name == "NPU 1"
    assert current_capabilities("cpu").device_type == "cpu"


def test_an_entry_point_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current, "entry_points", Points("npu", print))
    with pytest.raises(ConfigError, match=r"npu.*no quire.platforms.platform.Platform"):
        current_capabilities("npu")


def test_a_device_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown device 'tpu'; did you mean 'cpu'"):
        current_capabilities("tpu")
