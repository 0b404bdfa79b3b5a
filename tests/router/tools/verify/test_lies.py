"""Planted lies about answers: ``lockstep verify`` names each at the first token that shows it."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from engine.kernels.core import library
from engine.sampling import SamplingParams
from router.tools.verify.command import main
from router.tools.verify.verdict import VerifyStatus
from tests.router.tools.verify.answers import FLAGS, SAMPLED, save
from tests.router.tools.verify.lies import LIES, QUANTISED, Lie, fine_tune, result_of, tuned

pytestmark = pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")


def verdicts(directory: Path, lies: dict[str, Lie], *flags: str) -> dict[str, str]:
    """What one run of ``lockstep verify`` prints of each lie."""
    file = save(directory / "lies.jsonl", [lie.capsule for lie in lies.values()])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main([file, *FLAGS, *flags]) == VerifyStatus.DIFFERENT
    *lines, counts = printed.getvalue().splitlines()
    assert counts == f"{len(lies)} different"
    return dict(zip(lies, lines, strict=True))


def check(lie: Lie, line: str) -> None:
    assert f": sample 0 differs at token {lie.first} of {len(result_of(lie.capsule).token_ids)}: " in line
    assert lie.words in line


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Lie, str]]:
    """Lies of one run that looks for no quantisation."""
    directory = tmp_path_factory.mktemp("lies")
    lies = {name: make() for name, make in LIES.items()} | {"fine_tune": fine_tune(directory / "tuned")}
    lines = verdicts(directory, lies, "--no-explain")
    return {name: (lie, lines[name]) for name, lie in lies.items()}


@pytest.mark.parametrize("name", [*LIES, "fine_tune"])
def test_a_lie_is_named_at_the_first_token_that_shows_it(
    name: str, plain: dict[str, tuple[Lie, str]]
) -> None:
    check(*plain[name])


def test_a_quantisation_that_the_capsule_hides_is_found(tmp_path: Path) -> None:
    lies = {name: make() for name, make in QUANTISED.items()}
    lines = verdicts(tmp_path, lies)
    for name, lie in lies.items():
        check(lie, lines[name])


def test_lies_show_at_different_tokens(plain: dict[str, tuple[Lie, str]]) -> None:
    """So a verdict that named any one token would not pass."""
    assert len({lie.first for lie, _ in plain.values()}) > 4


def test_a_fine_tune_under_its_own_name_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tuned(tmp_path / "tuned").answer(SamplingParams(**SAMPLED))
    assert main([save(tmp_path / "own.json", [own]), *FLAGS]) == VerifyStatus.OTHER_MODEL
    assert f"the capsule is of checkpoint {own.model.fingerprint}, not of " in capsys.readouterr().out
