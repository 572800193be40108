"""How much staging a source gives a sink that attaches."""

from __future__ import annotations

from kvxfer.config import Config
from kvxfer.errors import ProtocolError
from kvxfer.transfer.costs import LEAST_SLOTS, MOST_SLOTS
from kvxfer.transports.parallel import most_further, num_streams
from kvxfer.transports.pipe import Pipe, Slots
from kvxfer.transports.stream_trial import MOST_TRIAL_SLOTS, trial_slots
from kvxfer.transports.stream_wire import FRAME_MAX_NBYTES, MAX_SLOTS, STREAM_VERSION, Attach


class Admission:
    """The rules of one source: its settings, and what is usual for its pipe and memory."""

    def __init__(self, pipe: Pipe, config: Config, device_type: str) -> None:
        self._pipe = pipe
        self._config = config
        self._num_slots = config.staging_slots or MOST_SLOTS
        self._device_type = device_type

    def num_streams(self, message: Attach, num_further: int) -> int:
        """How many streams the sink may have, where all sinks have so many further ones."""
        if message.is_trial or not self._pipe.has_streams:
            return 1
        room = most_further() - num_further
        return max(1, min(message.num_streams, num_streams(self._config), 1 + room))

    def admit(self, message: Attach, num_streams: int) -> Slots:
        """Raises ProtocolError for what does not go together, field by field."""
        for what, is_good, expected, got in (
            ("version", message.version == STREAM_VERSION, STREAM_VERSION, message.version),
            ("pipe", message.pipe == self._pipe.name, self._pipe.name, message.pipe),
            *(
                (name, 0 < value <= most, f"1 to {most}", value)
                for name, value, most in (
                    ("num_slots", message.num_slots, MAX_SLOTS),
                    ("slot_nbytes", message.slot_nbytes, FRAME_MAX_NBYTES),
                )
            ),
        ):
            if not is_good:
                raise ProtocolError(f"attach: {what}: expected {expected}, got {got}")
        slots = Slots(message.num_slots, message.slot_nbytes)
        if message.is_trial:
            most = Slots(MOST_TRIAL_SLOTS, trial_slots(self._device_type).slot_nbytes)
            if slots.num_slots <= most.num_slots and slots.slot_nbytes <= most.slot_nbytes:
                return slots
            raise ProtocolError(f"attach: expected at most {most} of a trial, got {slots}")
        return self._own_share(slots, num_streams)

    def _own_share(self, asked: Slots, num_streams: int) -> Slots:
        """As many of these slots as this side allows. Raises ProtocolError if not even two."""
        most_nbytes = self._config.staging_nbytes
        if most_nbytes is None:
            usual_nbytes = self._pipe.staging_size(self._device_type).over(num_streams).nbytes
            own_nbytes = self._num_slots * (self._config.chunk_nbytes or 0)
            most_nbytes = max(usual_nbytes, own_nbytes, LEAST_SLOTS * asked.slot_nbytes)
        if asked.slot_nbytes * LEAST_SLOTS > most_nbytes:
            raise ProtocolError(
                f"attach: slot_nbytes: expected 1 to {most_nbytes // LEAST_SLOTS}, because "
                f"staging_nbytes is {most_nbytes} here, got {asked.slot_nbytes}; set it on the "
                "other side, too"
            )
        most_slots = min(self._num_slots, most_nbytes // asked.slot_nbytes)
        return Slots(min(asked.num_slots, most_slots), asked.slot_nbytes)
