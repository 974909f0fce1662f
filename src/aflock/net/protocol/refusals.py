"""Refusals: an HTTP status, a code for programs and a sentence for people (docs/protocol.md).

The server raises `Refused` and answers with it; the client raises the same class from the answer.
"""

from __future__ import annotations

from ...errors import AflockError


class Refused(AflockError):
    """The server refused a request.

    The request changed nothing, with one exception: after the code `stopping` its record may be in the journal. The
    next start then applies it, and an update that is sent again gets its receipt.
    """

    def __init__(self, status: int, code: str, text: str, retry_after: float | None = None) -> None:
        super().__init__(text)
        self.status, self.code, self.retry_after = status, code, retry_after
        self.is_strike = False
        """Whether the server counts it against the client; the client need not know."""


def bad_token() -> Refused:
    """The answer does not say what is wrong with the token, so that it helps nobody to guess one."""
    return Refused(401, "token", "the token is not valid")


def revoked() -> Refused:
    """The operator has revoked the member."""
    return Refused(403, "revoked", "your invitation was revoked")


def suspended() -> Refused:
    """The client sent too many unusable updates in a row."""
    return Refused(403, "suspended", "you are suspended for unusable updates; ask for a new invitation")


def unknown_job() -> Refused:
    """The job is not open, or is another client's: the answer is the same, so that it tells nothing about others."""
    return Refused(409, "unknown-job", "this is not your open job: it was answered, dropped or never given; pull again")


def unusable(text: str, *, is_strike: bool = True) -> Refused:
    """An update that was received whole and that no rule can use; it counts as a strike, unless said otherwise."""
    refused = Refused(422, "unusable", text)
    refused.is_strike = is_strike
    return refused


def diverged(text: str) -> Refused:
    """An update that is not usable because the job's own model is not; it does not count as a strike."""
    return Refused(422, "diverged", f"the model of this job has diverged: {text}")


def rule_failed(why: str) -> Refused:
    """The strategy raised an error; the client tries again later."""
    return busy("rule-failed", f"{why}; the operator finds the error in the server's log", 60.0)


def ended(why: str) -> Refused:
    """The federation has ended."""
    return Refused(410, "ended", f"the federation has ended: {why}")


def stopping() -> Refused:
    """The server is shutting down."""
    return busy("stopping", "the server is stopping; try again", 2.0)


def busy(code: str, text: str, retry_after: float = 1.0) -> Refused:
    """The server cannot serve the request now; the client tries again after `retry_after` seconds."""
    return Refused(503, code, text, retry_after)
