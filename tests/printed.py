"""What a command printed."""

import pytest


def output_of(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed, without the line breaks of a narrow terminal."""
    return " ".join(capsys.readouterr().out.split())
