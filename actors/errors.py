"""Every error the processes raise of their own.

ActorError                anything below, with a stable `code`
+-- ListenError           the HTTP address can't be had: in use, not ours, unknown
+-- ActorLeft             an actor of a single process has reported a fatal error and unwinds
"""

from __future__ import annotations


class ActorError(Exception):
    """Base of the package; `code` is stable and may be matched on."""

    code = "actor_error"


class ListenError(ActorError):
    code = "listen"


class ActorLeft(ActorError):
    code = "actor_left"
