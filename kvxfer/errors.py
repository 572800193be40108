"""Every error that kvxfer raises on purpose."""


class KvxferError(Exception):
    """The base class of every error that kvxfer raises on purpose."""


class ConfigError(KvxferError):
    """The user's settings are wrong; nothing was started."""


class TransportUnavailable(ConfigError):
    """A wire that was asked for cannot work here; the message names the reason."""


class PeerError(KvxferError):
    """The other engine is the reason."""


class IncompatiblePeer(PeerError):
    """The peer's cache or protocol cannot be served; the message lists every differing field."""


class UnknownEngine(PeerError, KeyError):
    """An engine id that was never registered."""

    def __str__(self) -> str:
        # KeyError would print the repr of the message.
        return str(self.args[0]) if self.args else ""


class PeerLost(PeerError):
    """A peer, or a rank of this engine, has ended or stopped answering."""


class ProtocolError(KvxferError):
    """A message came in a state that does not allow it, or could not be decoded."""


class OutOfBlocks(KvxferError):
    """A request can never fit into the cache."""


class ModelError(KvxferError):
    """Model files are missing or describe something that is not supported."""
