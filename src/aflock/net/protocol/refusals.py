"""What a request is refused with: a status, a code for machines and a sentence for people (docs/protocol.md)."""

from __future__ import annotations

from ..errors import AflockError


class Refused(AflockError):
    """A request that is not granted; nothing was changed by it."""

    def __init__(self, status: int, code: str, text: str, retry_after: float | None = None) -> None:
        super().__init__(text)
        self.status, self.code, self.retry_after = status, code, retry_after


def bad_token() -> Refused:
    """Nothing says what is wrong with it."""
    return Refused(401, "token", "the token is not valid")


def revoked() -> Refused:
    """Shut out by whoever runs the federation."""
    return Refused(403, "revoked", "your invitation was revoked")


def suspended() -> Refused:
    """Shut out by its own updates."""
    return Refused(403, "suspended", "you are suspended for unusable updates; ask for a new invitation")


def unknown_job() -> Refused:
    """Another client's job looks the same as none: nobody learns which exist."""
    return Refused(409, "unknown-job", "this is not your open job: it was answered, dropped or never given; pull again")


def unusable(text: str) -> Refused:
    """An update that came whole, and is of no use."""
    return Refused(422, "unusable", text)


def ended(why: str) -> Refused:
    """The federation is over."""
    return Refused(410, "ended", f"the federation has ended: {why}")


def stopping() -> Refused:
    """The server is about to end."""
    return busy("stopping", "the server is stopping; try again", 2.0)


def busy(code: str, text: str, retry_after: float = 1.0) -> Refused:
    """Not now."""
    return Refused(503, code, text, retry_after)
