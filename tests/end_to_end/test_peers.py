"""``python -m bench peers``: which forms of weights stand beside which of llama.cpp's."""

import pytest

from bench import peers


def test_each_form_is_compared_with_its_peers_and_with_bf16(monkeypatch, tmp_path, capsys):
    """An arm of llama.cpp that fails is left out, and the others stay."""
    made = []

    def artifact(source, name, options):
        made.append(options)
        (tmp_path / name / "weights").mkdir(parents=True)
        (tmp_path / name / "weights/all").write_bytes(bytes(len(name)))
        return tmp_path / name

    def quantized(file, sources, form):
        (tmp_path / form).write_bytes(b"")
        return tmp_path / form

    speed = dict.fromkeys(peers.STEPS, 1.0)
    monkeypatch.setattr(peers, "checkpoint", lambda given, preset, layers: tmp_path / f"{preset}-{layers}")
    monkeypatch.setattr(peers, "artifact", artifact)
    monkeypatch.setattr(peers, "gguf", lambda source, sources: tmp_path / "gguf")
    monkeypatch.setattr(peers, "quantized", quantized)
    monkeypatch.setattr(peers, "ours", lambda folder: {step: len(folder.name) * 2.0 for step in speed})
    monkeypatch.setattr(peers, "llama", lambda file, *_: None if file.name == "Q4_0" else speed)
    found = peers.report(peers.measure(None, 12, 1, tmp_path, ["auto"], False, ["bf16", "int8", "int4"]))
    assert [options[4:] for options in made] == [[], ["--weights", "int8"], ["--weights", "int4"]]
    said = capsys.readouterr().out
    (head,) = (line for line in said.splitlines() if line.startswith("ratio"))
    assert head.split("  ")[-5:] == [
        "ling3export bf16, kernels auto / llama.cpp bf16",
        "ling3export int8, kernels auto / llama.cpp Q8_0",
        "ling3export int8, kernels auto / ling3export bf16, kernels auto",
        "ling3export int4, kernels auto / llama.cpp Q4_K_M",
        "ling3export int4, kernels auto / ling3export bf16, kernels auto",
    ]
    assert found["gigabytes"]["ling3export int8, kernels auto"] == pytest.approx(15e-9)
