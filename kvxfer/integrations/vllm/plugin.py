"""What is set up in every process of vLLM: the connector's name, and where its log lines go."""

from __future__ import annotations

import copy
import logging
from contextlib import suppress

from kvxfer.integrations import dynamo

NAME = "KvxferConnector"

_log = logging.getLogger("kvxfer.integrations")


def register() -> None:
    """Make ``kv_connector: KvxferConnector`` work without a module path. May be called again."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with suppress(ValueError):  # the name is registered already
        KVConnectorFactory.register_connector(NAME, "kvxfer.integrations.vllm", NAME)
    try:
        dynamo.register(NAME)
    except dynamo.UnknownDynamo as exc:  # vLLM without Dynamo goes on
        _log.warning("%s", exc)


PLAIN = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
"""Where vLLM has set up no logging."""


class _ToVllm(logging.Handler):
    """Writes where vLLM writes, in its format, whatever level its handlers have for its own
    loggers: that is ``VLLM_LOGGING_LEVEL``, ours is ``log_level``. Looked up for each record,
    because vLLM may set up its logging again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._plain = logging.StreamHandler()
        self._plain.setFormatter(logging.Formatter(PLAIN))

    def emit(self, record: logging.LogRecord) -> None:
        """To each of them past its level; its filters count. vLLM's format names no logger, only a
        file: the message says whose it is.
        """
        theirs = logging.getLogger("vllm").handlers
        if theirs:
            record = copy.copy(record)
            record.msg = f"kvxfer: {record.msg}"
        for handler in theirs or (self._plain,):
            handler.handle(record)


def show_logs(level: str) -> None:
    """Let kvxfer's loggers be seen from ``level`` on. May be called again.

    vLLM has handlers for its own loggers only. A level or handlers that somebody has given
    kvxfer's loggers stay, and where the root logger has handlers, these get the lines.
    """
    ours = logging.getLogger("kvxfer")
    if ours.level == logging.NOTSET:
        ours.setLevel(level)
    if not ours.hasHandlers():
        ours.addHandler(_ToVllm())
        ours.propagate = False  # or handlers that the root logger gets later write each line again
