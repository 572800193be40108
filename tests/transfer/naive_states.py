"""The truth about states: a model's state as channels and heads, and which of them each rank holds
where, as explicit lists. Shares nothing with regions and plans.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvxfer.transfer.manifest import RankId
from kvxfer.transfer.states import StatePart
from tests.builders import HEADER_NBYTES, EngineShape, StateShape, build_regions

Bytes = NDArray[np.uint8]


def held(part: StatePart, tp_rank: int, tp_size: int) -> list[int]:
    """The channels of a part that a rank holds, of all of the model's."""
    if part.num_heads >= tp_size:
        share = part.num_heads // tp_size
        heads = list(range(tp_rank * share, (tp_rank + 1) * share))
    else:
        heads = [tp_rank // (tp_size // part.num_heads)]
    return [head * part.num_channels + c for head in heads for c in range(part.num_channels)]


def write_state(
    shape: EngineShape, state: StateShape, tp_rank: int, block: int, seed: int, memory: Bytes
) -> None:
    """A request's state at one rank, channel by channel and step by step."""
    attention = EngineShape(
        **{
            name: getattr(shape, name)
            for name in EngineShape.__dataclass_fields__
            if name != "state"
        }
    )
    start = build_regions(attention, RankId(0, tp_rank))[1]
    assert start >= HEADER_NBYTES
    channels = [(p, c) for p in state.conv for c in held(p, tp_rank, shape.tp_size)]
    elements = held(state.recurrence, tp_rank, shape.tp_size)
    conv_nbytes = len(channels) * state.steps * 2
    block_nbytes = conv_nbytes + len(elements) * 4 + state.padding_nbytes
    for layer in range(state.num_layers):
        at = start + (layer * shape.num_blocks + block) * block_nbytes
        for number, (part, channel) in enumerate(channels):
            for step in range(state.steps):
                value = _value(seed, layer, part.plane, channel, step)[:2]
                element = number * state.steps + step
                if state.conv_layout == "SD":
                    element = step * len(channels) + number
                memory[at + element * 2 : at + element * 2 + 2] = value
        at += conv_nbytes
        for number, channel in enumerate(elements):
            value = _value(seed, layer, state.recurrence.plane, channel, 0)
            memory[at + number * 4 : at + number * 4 + 4] = value


def _value(seed: int, layer: int, plane: str, channel: int, step: int) -> Bytes:
    name = sum(plane.encode()) * 7919
    mixed = (seed * 131 + layer * 17 + name + channel * 104729 + step * 1299709) * 2654435761
    return np.frombuffer((mixed & 0xFFFFFFFF).to_bytes(4, "little"), np.uint8)
