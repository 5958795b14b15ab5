"""Every error transport raises.

TransportError            anything below, with a stable `code`
+-- WireError             a frame that isn't one of ours: bad bytes, unknown tag, over the size cap
+-- LinkClosed            this end was closed
+-- LinkFull              the peer is slow or absent (EAGAIN); the caller decides what that means
+-- AddressError          a path too long for ipc, or one that is already bound
+-- RunDirError           no instance, several instances, or a directory that isn't ours
+-- ClientError           what the embeddable client reports: the server's code and message
"""

from __future__ import annotations


class TransportError(Exception):
    """Base of the package; `code` is stable and may be matched on."""

    code = "transport_error"


class WireError(TransportError):
    code = "bad_frame"


class LinkClosed(TransportError):
    code = "link_closed"


class LinkFull(TransportError):
    code = "link_full"


class AddressError(TransportError):
    code = "bad_address"


class RunDirError(TransportError):
    """`code` is run_dir, or no_instance where no server runs at all."""

    def __init__(self, message: str, code: str = "run_dir") -> None:
        super().__init__(message)
        self.code = code


class ClientError(TransportError):
    """A request that ended badly at the server: `code` and `param` as in the HTTP error body, `status` its HTTP status.

    `param` is the field at fault, empty where none is.
    """

    def __init__(self, code: str, message: str, status: int = 500, param: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.param = param
