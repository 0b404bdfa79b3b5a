"""Some rows of the table of families, and how it is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from engine.kernels.core import library
from tests.families.__main__ import refused_table, table, wrong
from tests.families.configs import PUBLISHED, families, layer_types, make_config
from tests.families.measure import EXACT, NONE, REFUSED, Row, measure

DENSE, SPARSE = (EXACT, NONE, EXACT, EXACT), (EXACT,) * 4
ROWS = {
    "aria_text": (EXACT, EXACT, REFUSED, EXACT),
    "GLM-5.2, short contexts": SPARSE,
    "Gemma 4, experts": SPARSE,
    "Granite 4.0 micro": DENSE,
    "Granite 4.0, all attention": SPARSE,
    "bloom": (EXACT, NONE, REFUSED, REFUSED),
    "nemotron": DENSE,
    "Qwen3VL (language part)": DENSE,
    "Qwen3VLMoe (language part)": (EXACT, EXACT, REFUSED, EXACT),
    "ernie4_5_moe": SPARSE,
}
"""Family -> its verdicts with dp, ep, tp and pp."""


@pytest.mark.parametrize("family", ROWS)
def test_verdicts(family: str, tmp_path: Path) -> None:
    row = measure(family, tmp_path)
    assert (row.dp, row.ep, row.tp, row.pp) == ROWS[family], row.notes


@pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")
def test_contexts_that_are_seen_whole_are_computed_by_the_kernels(tmp_path: Path) -> None:
    row = measure("DeepSeek-V3.2, short contexts", tmp_path)
    assert (row.dp, row.kernels) == (EXACT, "native"), row.notes


def test_a_refusal_says_whether_config_json_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measure("inkling_text", tmp_path / "early").notes[0].startswith("config.json: ")
    monkeypatch.setattr("engine.attention.own_attention.KINDS", {})
    late = measure("falcon", tmp_path / "late")
    assert (late.dp, late.pp) == (REFUSED, REFUSED)
    assert late.notes[0].startswith("dp: ")


def test_nearly_all_families_have_a_tiny_configuration() -> None:
    without = []
    for family in families():
        try:
            make_config(family)
        except Exception as error:  # noqa: BLE001 (of the classes)
            without.append(f"{family}: {error}")
    assert len(without) < len(families()) // 20, without


def test_tiny_models_have_the_layer_types_of_published_ones() -> None:
    others = {}
    for family in set(families()) & set(CONFIG_MAPPING):
        try:
            found = layer_types(make_config(family))
        except Exception:  # noqa: BLE001 (a class that does not take the sizes: see above)
            continue
        published = PUBLISHED.get(family) or layer_types(CONFIG_MAPPING[family]())
        if found != published:
            others[family] = found ^ published
    assert not others
    assert len(set(families()) & set(CONFIG_MAPPING)) > 150


def test_the_table() -> None:
    rows = [
        Row("bad", "BadForCausalLM", EXACT, NONE, "3 of 24 differ", "fails", "torch", ["pp: a | b"]),
        Row("good", "GoodForCausalLM", *SPARSE, "native"),
        Row("no", "NoForCausalLM", *(REFUSED,) * 4, "", ["config.json: NoForCausalLM is not served"]),
        Row("unknown", notes=["no tiny model"]),
    ]
    assert wrong(rows) == ["bad, tp: 3 of 24 differ"]
    lines = table(rows).splitlines()
    assert lines[-2:] == [
        "| bad (BadForCausalLM) | exact | – | 3 of 24 differ | fails | torch | pp: a \\| b |",
        "| good (GoodForCausalLM) | exact | exact | exact | exact | native |  |",
    ]
    assert (
        f"4 of {len(families())} families: exact are 2 with dp, 1 with ep, 1 with tp, 1 with pp; 1 run"
        in lines[2]
    )
    assert lines[3] == "No verdict: unknown."
    rows.append(
        Row("later", "LaterForCausalLM", *(REFUSED,) * 4, "", ["dp: LaterForCausalLM: m.0.att has no"])
    )
    rows.append(Row("other", "Other", *(REFUSED,) * 4, "", ["dp: Other: layers.1.att has no"]))
    assert refused_table(rows).splitlines()[2:] == [
        "| a layer has no | later (LaterForCausalLM), other (Other) |",
        "| config.json: is not served | no (NoForCausalLM) |",
    ]


def test_remarks_of_many_families_stand_once_before_the_table() -> None:
    rows = [
        Row(family, f"{family}ForCausalLM", EXACT, NONE, REFUSED, REFUSED, "torch", notes)
        for family, notes in (
            ("A", ["tp: AForCausalLM has no plan", "pp: has no layers"]),
            ("B", ["tp: BForCausalLM has no plan"]),
            ("C", ["tp: CForCausalLM has no plan", "pp: has no layers"]),
        )
    ]
    lines = table(rows).splitlines()
    assert lines[4:7] == ["1. has no plan", "2. has no layers", ""]
    assert lines[-2:] == [
        "| A (AForCausalLM), C (CForCausalLM) | exact | – | refused | refused | torch | tp: (1); pp: (2) |",
        "| B (BForCausalLM) | exact | – | refused | refused | torch | tp: (1) |",
    ]
