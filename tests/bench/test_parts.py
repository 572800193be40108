"""The parts that benchmarks share: what they check with, what they survive, what they write."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from kvxfer.bench.contenders import Way
from kvxfer.bench.core import (
    ContenderLost,
    Report,
    Table,
    Timing,
    WrongBytes,
    cells_of,
    facts_of,
)
from kvxfer.bench.kernels import torch_copy
from kvxfer.bench.members import SINK, SOURCE, Devices, Memory, devices_for
from kvxfer.bench.nixl_ways import SETTINGS
from kvxfer.bench.plain_ways import MEMCPY, PlainCopy
from kvxfer.bench.plots import Line, Plot
from kvxfer.bench.pools import (
    POISON,
    SHAPES,
    TINY,
    Pool,
    Request,
    Shape,
    layout_of,
    request_of,
)
from kvxfer.bench.transfer import peer_aim
from kvxfer.bench.transfer_report import case_of
from kvxfer.bench.workers import Worker, close_all
from kvxfer.tensors.strided_copy import Scratch, strided_copy

CPU = Devices("cpu", "cpu", "shm")
LAYOUTS = ("HND16->HND16", "HND16->NHD64", "NHD64->HND16", "NHD24->HND16", "NHD8->NHD8")
SMALL = Shape("small", 3, 2, 8)


def bytes_of(pool: Pool, seed: int) -> torch.Tensor:
    numbers = np.random.default_rng(seed).integers(0, 256, pool.nbytes + 32, dtype=np.uint8)
    return torch.from_numpy(numbers)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_the_view_of_a_pool_and_what_the_code_under_test_is_told_agree(layout: str) -> None:
    pool = Pool(layout, 4, 5, SMALL)
    memory = bytes_of(pool, 1)
    blocks, tile = pool.blocks(memory), pool.side().tile
    for region, base in enumerate(pool.side().bases):
        for block in range(5):
            for token in range(4):
                for head in range(2):
                    at = base.offset + block * tile.stride_block
                    at += head * tile.stride_head + token * tile.stride_token
                    got = blocks[region, block, token, head]
                    assert got.tolist() == memory[at : at + 8].tolist()
    regions = pool.kv_regions()
    assert [r.layer for r in regions] == ["layers.0", "layers.0", "layers.1"]
    assert [r.plane for r in regions] == ["k", "v", "k"]
    assert [r.address(0, 0, 0) for r in regions] == [b.offset for b in pool.side().bases]
    assert max(r.end for r in regions) == pool.nbytes


def test_shapes_are_those_of_the_models() -> None:
    # Llama 3: 32 or 80 layers of K and V; 8 heads of 128 bf16 values, one a rank with TP 8
    named = {s.name: (s.regions, s.heads, s.inner_nbytes) for s in SHAPES.values()}
    assert named["8B"] == (64, 8, 256)
    assert named["70B-TP8"] == (160, 1, 256)
    long = request_of(SHAPES["8B"], "HND16->NHD64", 32768, 32768 * 9 // 8)
    assert long.nbytes == 4 << 30
    assert (long.source.num_blocks, long.sink.num_blocks) == (2304, 576)


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_the_class_for_wires_moves_the_same_tokens(layouts: str) -> None:
    request = request_of(SMALL, layouts, 50, 192)
    source = bytes_of(request.source, 3)
    sink = torch.full((request.sink.nbytes,), POISON, dtype=torch.uint8)
    copy_class, pull = request.copy_class()
    strided_copy(
        (source,),
        (sink,),
        copy_class,
        request.source_ids,
        request.sink_ids,
        (0, pull.token_hi),
        scratch=Scratch(),
    )
    tokens = request.sampled_tokens(50)
    assert tokens == list(range(50))
    given = request.source.token_digests(source, request.source_ids, tokens)
    assert given == request.sink.token_digests(sink, request.sink_ids, tokens)


def test_pieces_are_the_blocks_of_the_request() -> None:
    request = request_of(SMALL, "NHD8->NHD8", 24, 64)
    source, sink = bytes_of(request.source, 4), bytes_of(request.sink, 5)
    given, taken = request.pieces()
    assert given.size == taken.size == 3 * 3
    for ours, theirs in zip(taken.tolist(), given.tolist(), strict=True):
        nbytes = request.source.block_nbytes
        sink[ours : ours + nbytes] = source[theirs : theirs + nbytes]
    tokens = request.sampled_tokens(24)
    assert request.source.token_digests(
        source, request.source_ids, tokens
    ) == request.sink.token_digests(sink, request.sink_ids, tokens)


def test_nixl_is_measured_in_two_settings_between_gpus() -> None:
    assert [(s.operation, s.initiator, dict(s.environment)) for s in SETTINGS] == [
        ("READ", SINK, {}),
        ("WRITE", SOURCE, {"NIXL_UCX_SGL_ENABLE": "1"}),
    ]


def test_samples_have_the_first_and_the_last_token() -> None:
    tokens = request_of(SMALL, "HND16->HND16", 1000, 1000).sampled_tokens(10)
    assert (len(tokens), tokens[0], tokens[-1]) == (10, 0, 999)
    assert tokens == sorted(set(tokens))


def test_blocks_that_were_written_beside_the_request_are_seen() -> None:
    pool = Pool("NHD", 4, 5, SMALL)
    memory = torch.full((pool.nbytes,), POISON, dtype=torch.uint8)
    ids = np.array([2, 0])
    memory[2 * pool.block_nbytes] = 1
    assert pool.is_untouched_beside(memory, ids)
    memory[-1] = 1  # block 4 of the last region
    assert not pool.is_untouched_beside(memory, ids)


@pytest.mark.parametrize("text", ["HND", "HND0", "NDH16", "HND1x"])
def test_a_layout_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="layout: expected"):
        layout_of(text)


def test_requests_need_two_layouts() -> None:
    with pytest.raises(ValueError, match="two with ->"):
        request_of(SMALL, "HND16", 16, 16)


# ------------------------------------------------------------------ processes


class Worked:
    """In another process."""

    def __init__(self, name: str) -> None:
        if name == "broken":
            raise ValueError("cannot be")
        self.name = name

    def greet(self, other: str) -> str:
        return f"{self.name} greets {other}, {os.environ.get('BENCH_WORD')}"

    def fail(self) -> None:
        raise ValueError("not today")

    def die(self) -> None:
        os._exit(3)

    def sleep(self, duration_s: float) -> None:
        time.sleep(duration_s)


def test_a_worker_answers_and_survives_what_fails() -> None:
    worker = Worker("one", Worked, "Ann", environment={"BENCH_WORD": "hello"})
    try:
        assert worker.call(str, "greet", "Bob") == "Ann greets Bob, hello"
        with pytest.raises(ContenderLost, match="one: fail: ValueError: not today"):
            worker.call(object, "fail")
        assert worker.call(str, "greet", "Eve") == "Ann greets Eve, hello"
        with pytest.raises(ContenderLost, match="die: the process ended with 3"):
            worker.call(object, "die")
        with pytest.raises(ContenderLost, match="ended with 3"):
            worker.call(str, "greet", "Eve")
    finally:
        worker.close()


def test_a_worker_that_hangs_or_does_not_start_is_lost() -> None:
    slow, broken = Worker("slow", Worked, "Ann"), Worker("broken", Worked, "broken")
    try:
        slow.ready()
        with pytest.raises(ContenderLost, match="expected an answer within 0.2 s"):
            slow.call(object, "sleep", 30.0, timeout_s=0.2)
        for _ in range(2):
            with pytest.raises(ContenderLost, match="start: ValueError: cannot be"):
                broken.ready()
    finally:
        close_all((slow, broken))


# ------------------------------------------------------------------ checks and tables


class FakeWorker(Worker):
    """A process that is none: a member of a benchmark in this one."""

    def __init__(self, member: object) -> None:
        self.member = member

    def call(self, kind: type, method: str, *arguments: object, timeout_s: float = 0) -> object:  # type: ignore[override]
        return getattr(self.member, method)(*arguments)


class Spoiled(PlainCopy):
    """Copies all but one byte, or one byte too many."""

    def __init__(self, offset: int) -> None:
        super().__init__(CPU, request_of(TINY, "HND16->HND16", 64, 96).sink.nbytes)
        self.offset = offset

    def run(self, way: str, request: Request) -> Timing:
        source, sink = self.memories[SOURCE].tensor, self.memories[SINK].tensor
        torch_copy(request, source, sink)()
        sink[self.offset] ^= 1
        return Timing(0.0)


@pytest.mark.parametrize(
    ("is_inside", "message"), [(True, "wrong bytes in tokens"), (False, "beside")]
)
def test_wrong_bytes_are_found(is_inside: bool, message: str) -> None:
    request = request_of(TINY, "HND16->HND16", 64, 96)
    inside = int(request.pieces()[1][0])
    free = set(range(request.sink.num_blocks)) - set(request.sink_ids.tolist())
    member = Spoiled(inside if is_inside else free.pop() * request.sink.block_nbytes)
    worker = FakeWorker(member)
    way = Way("spoiled", worker, worker)
    try:
        with pytest.raises(WrongBytes, match=message):
            way.check(request)
    finally:
        member.close()


def test_the_limit_moves_as_many_bytes() -> None:
    request = request_of(TINY, "HND16->HND16", 64, 96)
    member = PlainCopy(CPU, request.sink.nbytes)
    try:
        member.poison()
        member.run(MEMCPY, request)
        tensors = {side: memory.tensor for side, memory in member.memories.items()}
        nbytes = request.nbytes
        assert torch.equal(tensors[SINK][:nbytes], tensors[SOURCE][:nbytes])
        assert bool((tensors[SINK][nbytes:] == POISON).all())
        del tensors
    finally:
        member.close()


def test_random_memory_differs_and_repeats() -> None:
    memories = [Memory("cpu", 4096) for _ in range(2)]
    for memory in memories:
        memory.fill_random(seed=5)
    assert torch.equal(memories[0].tensor, memories[1].tensor)
    assert len(set(memories[0].tensor.tolist())) > 200
    for memory in memories:
        memory.close()


def test_devices_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices_for("cpu") == CPU
    assert CPU.where == "cpu"
    assert Devices("cuda:1", "cuda:0", "cuda_ipc").where == "peer"
    assert Devices("cuda:0", "cuda:0", "cuda_ipc").where == "local"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="expected a CUDA device"):
        devices_for("cuda")


def test_cells_are_medians_beside_memcpy() -> None:
    request = request_of(SHAPES["70B-TP8"], "HND16->NHD64", 8192, 9216)
    taken = {
        MEMCPY: [Timing(s, 0.0, 0.0) for s in (1.0, 2.0, 3.0)],
        "kvxfer cuda_ipc": [Timing(s, 0.5, 0.25) for s in (2.0, 2.5, 4.0)],
    }
    aim_of = {way: peer_aim(request, way) for way in taken}.get
    cells = {cell.way: cell for cell in cells_of(case_of(request), taken, aim_of=aim_of)}
    ours = cells["kvxfer cuda_ipc"]
    assert (ours.p50_ms, ours.post_ms, ours.cpu_ms) == (2500.0, 500.0, 250.0)
    assert ours.ratio == pytest.approx(0.75)
    assert ours.gbps[1] == pytest.approx(8192 * 160 * 256 / 2.5 / 1e9)
    assert ours.aim == "0.9 MISSED"  # one head: 256-byte runs
    assert cells[MEMCPY].aim == ""


def test_a_report_has_its_tables_and_survives_without_cells(tmp_path: Path) -> None:
    facts = facts_of("kvxfer bench x --quick", ("torch", "no-such-package"), "of a test")
    assert (facts["no-such-package"], facts["note"]) == ("not installed", "of a test")
    table = Table("times", "In ms.", ("a", "b"), (("1", "2"),))
    empty = Table("nothing", "", ("a",), ())
    plot = Plot("speed", "bytes", "GB/s", (Line("one", (1, 1024), (1, 10), is_limit=True),))
    tables = [table, empty]
    report = Report(tmp_path, "r", "Title", facts, lambda _: tables, lambda _: plot, date="today")
    report.records["where"], report.lost["two"] = "here", "it ended"
    report.write(is_last=True)
    text = (tmp_path / "r_today.md").read_text()
    assert text.startswith("# Title, today\n")
    assert "| a | b |\n|---|---|\n| 1 | 2 |" in text
    assert "Command: `kvxfer bench x --quick`" in text
    assert "## nothing" not in text
    assert "| two | it ended |" in text
    known = json.loads((tmp_path / "r_today.json").read_text())
    assert (known["where"], known["lost"]) == ("here", {"two": "it ended"})
