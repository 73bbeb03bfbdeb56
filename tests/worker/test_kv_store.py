"""Pages in memory and in a file: what is read is what was written, or nothing."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from quire.errors import ConfigError
from quire.messages.kv_tiers import ALIGNMENT, PageContent, header_bytes, slot_bytes, slots_in
from quire.worker.kv_file import NAME, FilePages
from quire.worker.kv_store import MemoryPages, Page, PageStore, digest_of

PAGE_BYTES, BLOCK_SIZE, NUM_SLOTS = 5000, 4, 6
ENGINE = bytes(range(32))


def content(number: int) -> PageContent:
    return 1, number.to_bytes(16), bytes(16), (number, 2, 3, 4)


def page_of(number: int) -> Page:
    return np.random.default_rng(number).integers(0, 256, PAGE_BYTES, dtype=np.uint8)


def put(store: PageStore, slot: int, number: int) -> None:
    room = store.room_for(slot, content(number))
    assert room is not None
    room[:] = page_of(number)
    store.commit(slot, content(number), digest_of(room))


def is_there(store: PageStore, slot: int, number: int) -> bool:
    page = store.verified(slot, content(number))
    assert page is None or bytes(page) == bytes(page_of(number)), "a wrong page"
    return page is not None


def spoil(store: PageStore, slot: int, place: int) -> None:
    """Change one bit of a page where it lies."""
    tier, index = store._at(slot)
    page = tier.read(index)
    page[place] ^= 16
    if isinstance(tier, FilePages):
        begin = ALIGNMENT + index * slot_bytes(PAGE_BYTES, BLOCK_SIZE) + header_bytes(BLOCK_SIZE)
        os.pwrite(tier._fd, page.tobytes(), begin)


def open_file(directory: Path, engine: bytes = ENGINE, num_slots: int = NUM_SLOTS) -> FilePages:
    return FilePages(directory, num_slots, page_bytes=PAGE_BYTES, block_size=BLOCK_SIZE, engine=engine)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "new" / "pages"


@pytest.fixture(params=["memory", "file", "memory and file"])
def store(request: pytest.FixtureRequest, directory: Path) -> PageStore:
    memory = MemoryPages(3, PAGE_BYTES)
    return {
        "memory": lambda: PageStore([MemoryPages(NUM_SLOTS, PAGE_BYTES)]),
        "file": lambda: PageStore([open_file(directory)]),
        "memory and file": lambda: PageStore([memory, open_file(directory, num_slots=3)]),
    }[request.param]()


def test_a_page_comes_back_as_it_was_written(store: PageStore) -> None:
    for slot in range(NUM_SLOTS):
        put(store, slot, slot)
    assert all(is_there(store, slot, slot) for slot in range(NUM_SLOTS))
    assert not is_there(store, 0, 1), "another page than the one that is wanted"
    assert not is_there(store, 0, 0), "and who asks for another one cannot rely on the slot any more"
    store.clear()
    assert not is_there(store, 1, 1)
    assert not store.found()
    store.close()
    store.close()


def test_a_page_with_one_changed_bit_is_no_page(store: PageStore) -> None:
    for slot, place in ((0, 0), (3, PAGE_BYTES // 2), (5, PAGE_BYTES - 1)):
        put(store, slot, slot)
        spoil(store, slot, place)
        assert not is_there(store, slot, slot)


def test_a_step_that_is_run_again_writes_no_page_again(store: PageStore) -> None:
    put(store, 0, 7)
    assert store.room_for(0, content(7)) is None
    assert store.room_for(0, content(8)) is not None
    assert not is_there(store, 0, 7), "from then on it is another one's slot"


def test_pages_move_with_their_digests(store: PageStore) -> None:
    put(store, 0, 7)
    store.move(0, 4, content(7))
    store.move(1, 5, content(8))  # which is not there
    put(store, 0, 9)
    store.move(0, 4, content(7))  # again
    assert is_there(store, 4, 7)
    assert is_there(store, 0, 9)
    assert not is_there(store, 5, 8)
    spoil(store, 0, 3)
    store.move(0, 5, content(9))
    assert not is_there(store, 5, 9), "what was corrupted before it moved"


# -- file -------------------------------------------------------------------------------------------------------


def filled(directory: Path, numbers: range = range(NUM_SLOTS)) -> None:
    store = PageStore([open_file(directory)])
    for number in numbers:
        put(store, number, number)
    store.close()


def test_the_next_engine_finds_the_pages(directory: Path) -> None:
    filled(directory, range(4))
    store = PageStore([open_file(directory)])
    assert store.found() == [(slot, content(slot)) for slot in range(4)]
    assert all(is_there(store, slot, slot) for slot in range(4))
    store.close()


@pytest.mark.parametrize("num_left", [0, 1, 3])
def test_pages_of_a_file_that_is_truncated_while_it_is_used_are_not_there(num_left: int, directory: Path) -> None:
    """With `num_left` whole slots left; in a mapped file the process would end."""
    store = PageStore([open_file(directory)])
    for slot in range(NUM_SLOTS):
        put(store, slot, slot)
    os.truncate(directory / NAME, ALIGNMENT + num_left * slot_bytes(PAGE_BYTES, BLOCK_SIZE))
    assert [is_there(store, slot, slot) for slot in range(NUM_SLOTS)] == [slot < num_left for slot in range(NUM_SLOTS)]
    put(store, NUM_SLOTS - 1, 9)
    assert is_there(store, NUM_SLOTS - 1, 9), "the file grows again"
    store.close()


def test_a_page_that_the_disk_does_not_take_is_not_there(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PageStore([open_file(directory)])

    def write(fd: int, data: bytes, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", write)
        put(store, 0, 0)
        assert not is_there(store, 0, 0)
    put(store, 0, 0)
    assert is_there(store, 0, 0)
    store.close()


def test_file_and_directory_are_private_and_of_a_fixed_size(directory: Path) -> None:
    old = os.umask(0)
    try:
        filled(directory)
    finally:
        os.umask(old)
    status = (directory / NAME).stat()
    assert status.st_mode & 0o777 == 0o600
    assert directory.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in directory.iterdir()] == [NAME]
    assert status.st_size == ALIGNMENT + NUM_SLOTS * slot_bytes(PAGE_BYTES, BLOCK_SIZE)
    assert slots_in(status.st_size, PAGE_BYTES, BLOCK_SIZE) == NUM_SLOTS
    assert slots_in(status.st_size - 1, PAGE_BYTES, BLOCK_SIZE) == NUM_SLOTS - 1
    assert status.st_blocks * 512 >= status.st_size, "it has its disk space from the start"


@pytest.mark.parametrize("change", ["engine", "slots", "page", "block"])
def test_an_engine_that_computes_otherwise_starts_with_an_empty_file(change: str, directory: Path) -> None:
    filled(directory)
    other = FilePages(
        directory,
        NUM_SLOTS + (change == "slots"),
        page_bytes=PAGE_BYTES + 8 * (change == "page"),
        block_size=BLOCK_SIZE + (change == "block"),
        engine=bytes(32) if change == "engine" else ENGINE,
    )
    assert not PageStore([other]).found()
    other.close()
    store = PageStore([open_file(directory)])
    assert not store.found(), "nor does the first one find any of its own when it comes back"
    store.close()


@pytest.mark.parametrize("place", ["magic", "engine", "hash", "tokens", "digest", "page"])
def test_what_was_changed_in_the_file_is_not_found(place: str, directory: Path) -> None:
    filled(directory)
    offset = {"magic": 0, "engine": 9, "hash": 60, "tokens": 105, "digest": 95, "page": header_bytes(BLOCK_SIZE) + 17}
    with open(directory / NAME, "r+b") as file:
        begin = ALIGNMENT + 2 * slot_bytes(PAGE_BYTES, BLOCK_SIZE) + offset[place]
        file.seek(begin)
        byte = file.read(1)[0]
        file.seek(begin)
        file.write(bytes([byte ^ 255]))
    store = PageStore([open_file(directory)])
    assert [slot for slot in range(NUM_SLOTS) if is_there(store, slot, slot)] == [0, 1, 3, 4, 5]
    assert len(store.found()) == NUM_SLOTS - 1
    store.close()


@pytest.mark.parametrize("left", [0, 7, ALIGNMENT + 100, 3 * ALIGNMENT])
def test_a_file_that_was_cut_off_or_has_rubbish_is_an_empty_one(left: int, directory: Path) -> None:
    filled(directory)
    os.truncate(directory / NAME, left)
    store = PageStore([open_file(directory)])
    assert not [slot for slot in range(NUM_SLOTS) if is_there(store, slot, slot)]
    put(store, 0, 1)
    assert is_there(store, 0, 1)
    store.close()


def test_a_slot_that_is_being_written_is_empty(directory: Path) -> None:
    filled(directory)
    store = PageStore([open_file(directory)])
    room = store.room_for(2, content(9))
    assert room is not None
    room[: PAGE_BYTES // 2] = 0  # and here the process ends
    store.close()
    store = PageStore([open_file(directory)])
    assert [slot for slot, _ in store.found()] == [0, 1, 3, 4, 5]
    store.close()


def test_two_engines_do_not_share_a_directory(directory: Path) -> None:
    first = open_file(directory)
    with pytest.raises(ConfigError, match="used by another engine"):
        open_file(directory)
    first.close()
    open_file(directory).close()


def test_a_directory_that_others_can_use_is_refused(tmp_path: Path) -> None:
    open_to_others = tmp_path / "open"
    open_to_others.mkdir(mode=0o755)
    open_to_others.chmod(0o755)
    with pytest.raises(ConfigError, match="0755, not 0700"):
        open_file(open_to_others)


def test_what_cannot_be_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        open_file(tmp_path / "file")
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "own" / NAME).symlink_to(tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot be used"):
        open_file(tmp_path / "own")
    assert not (tmp_path / "file").read_text(), "no link is followed"


@pytest.mark.parametrize("kind", ["pipe", "another name", "another user"])
def test_what_others_can_reach_is_not_written(kind: str, directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True)
    other = directory.parent / "other"
    other.write_bytes(b"precious")
    if kind == "pipe":
        os.mkfifo(directory / NAME)
    else:
        os.link(other, directory / NAME)
    if kind == "another user":
        if os.geteuid() != 0:
            pytest.skip("only root can give a file away")
        other.unlink()
        os.chown(directory / NAME, 12345, 12345)
    with pytest.raises(ConfigError, match="no file of this user under that one name"):
        open_file(directory)
    if kind != "pipe":
        assert (directory / NAME).read_bytes() == b"precious"


def test_another_users_directory_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.mkdir(mode=0o700, parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(directory).st_uid + 1)
    with pytest.raises(ConfigError, match="it belongs to another user"):
        open_file(directory)


def test_pages_outlive_a_start_for_which_there_was_no_room(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(directory)
    with pytest.raises(ConfigError, match=r"no room for .* GiB|cannot be used"):
        open_file(directory, num_slots=1 << 38)

    def allocate(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", allocate)
        with pytest.raises(ConfigError, match="no room for"):
            open_file(directory, num_slots=2 * NUM_SLOTS)
    store = PageStore([open_file(directory)])
    assert len(store.found()) == NUM_SLOTS
    store.close()


def test_a_disk_without_room_is_refused(directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"no room for .* GiB|cannot be used"):
        FilePages(directory, 1 << 38, page_bytes=PAGE_BYTES, block_size=BLOCK_SIZE, engine=ENGINE)
    assert not (directory / NAME).exists() or (directory / NAME).stat().st_size == 0


WRITER = """
import sys
from pathlib import Path
from tests.worker.test_kv_store import NUM_SLOTS, PageStore, open_file, put
store = PageStore([open_file(Path(sys.argv[1]))])
number = int(sys.argv[2])
print("ready", flush=True)
while True:
    put(store, number % NUM_SLOTS, number)
    number += 1
"""


@pytest.mark.slow
def test_what_a_killed_process_leaves_is_whole_or_not_found(directory: Path) -> None:
    num_found = 0
    for run in range(20):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(directory), str(1000 * run)], stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline()
            time.sleep(0.002 * run)
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        store = PageStore([open_file(directory)])
        found = store.found()
        num_found += len(found)
        for slot, (_, own, _, _) in found:
            assert is_there(store, slot, int.from_bytes(own)), "a whole page, and the right one"
        assert len(found) >= NUM_SLOTS - 1 or run == 0
        store.close()
    assert num_found > 50
