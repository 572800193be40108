"""A stream wire's sink before its first read from a rank: the trial, and the bounds of staging."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

from kvxfer.config import Config
from kvxfer.transfer.costs import StagingBounds
from kvxfer.transfer.manifest import RankManifest
from kvxfer.transports.base import LocalMemory, Trial, kind_of
from kvxfer.transports.channel import Context
from kvxfer.transports.pipe import MakePipe, Pipe, Slots
from kvxfer.transports.stream_link import Link, open_link
from kvxfer.transports.stream_trial import DEVICE_CHUNK_S, trial_slots
from kvxfer.transports.stream_ways import try_ways
from kvxfer.transports.stream_wire import TrialHeader
from kvxfer.transports.wake_up import WakeUp


class Contact:
    """Of one sink, with whatever rank it meets."""

    def __init__(
        self, make_pipe: MakePipe, memory: LocalMemory, config: Config, context: Context
    ) -> None:
        self._make_pipe, self._memory = make_pipe, memory
        self._config, self._context = config, context

    def trial(self, source: RankManifest, timeout_s: float, *, uses_unix_sockets: bool) -> Trial:
        """Ask for a few messages over a pipe of its own, in each of its ways. Raises
        TransportUnavailable.
        """
        with (
            closing(WakeUp()) as wake,
            closing(self._make_pipe(self._memory, self._config, wake)) as pipe,
        ):

            def make_link(slots: Slots, way: str) -> Link[TrialHeader]:
                return open_link(
                    pipe,
                    slots,
                    source,
                    self._config,
                    self._context,
                    uses_unix_sockets=uses_unix_sockets,
                    is_trial=True,
                    way=way,
                )

            kinds = self._device_types(source)
            trial = try_ways(pipe, make_link, trial_slots(*kinds), wake, timeout_s)
        if kinds == {"cpu"}:
            return trial
        message_s = max(trial.costs.message_s, DEVICE_CHUNK_S)
        return replace(trial, costs=replace(trial.costs, message_s=message_s))

    def staging_bounds(self, source: RankManifest, pipe: Pipe) -> StagingBounds:
        """Settings, and what is usual for the memory of both sides."""
        config = self._config
        sizes = [pipe.staging_size(each) for each in self._device_types(source)]
        return StagingBounds(
            nbytes=config.staging_nbytes or min(size.nbytes for size in sizes),
            most_chunk_nbytes=min(size.most_slot_nbytes for size in sizes),
            is_limit=config.staging_nbytes is not None,
            chunk_nbytes=config.chunk_nbytes,
            num_slots=config.staging_slots,
            busy_slots=min(size.busy_slots for size in sizes),
        )

    def _device_types(self, source: RankManifest) -> set[str]:
        """Of the memory of both sides."""
        return {self._memory.device.type, *(kind_of(each.device) for each in source.memories)}
