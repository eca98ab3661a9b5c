"""What a check of the doctor has found, in short."""

from ddplaunch.tools.doctor import Verdict


def found(verdict: Verdict) -> list[tuple[str, str]]:
    """The severity and the title of each finding."""
    return [(one.severity, one.title) for one in verdict.findings]
