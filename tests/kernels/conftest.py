import pytest

from espalier.kernels.cpu import threads as workers


@pytest.fixture(autouse=True)
def help_is_always_asked_for(monkeypatch: pytest.MonkeyPatch):
    """Threads, two at least, share even what is quickly done alone: what tests compute is small."""
    monkeypatch.setattr(workers, "_WORTH_HELP", 0.0)
    monkeypatch.setattr(workers._helpers, "wanted", max(2, workers.usable_cores()) - 1)
