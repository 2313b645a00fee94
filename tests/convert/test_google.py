import numpy as np
import pytest
import torch
from oracles import ORACLES, formula
from small_checkpoint import CLASSES

from vitpt import checkpoint
from vitpt.convert import convert, from_google, google, to_google
from vitpt.errors import Exit, VitptError
from vitpt.models.variants import ViTConfig
from vitpt.objectives import build_task
from vitpt.recipe import schema

CASE = ORACLES["npz_tiny"]


def _tiny_arrays(dtype=np.float32):
    arrays = {}
    for k, (name, shape) in enumerate(CASE["order"]):
        values = formula(tuple(shape), 0.3, 0.37, k, 1.0 if name.endswith("scale") else 0.0)
        arrays[name] = values.numpy().astype(dtype)
    return arrays


def _save(path, arrays):
    np.savez(path, **arrays)
    return path


def _equal(path, arrays):
    with np.load(path, allow_pickle=False) as archive:
        assert set(archive.files) == set(arrays)
        for name, values in arrays.items():
            assert archive[name].dtype == np.float32
            np.testing.assert_array_equal(archive[name], values, err_msg=name)


def _load(folder):
    """The task of a checkpoint folder."""
    described = checkpoint.read_config(folder)
    tensors = checkpoint.load_tensors(folder)
    section = schema.Supervised(**described["objective"])
    task = build_task(ViTConfig.from_dict(described["model"]), section, len(tensors["objective.head.bias"]))
    task.load_state_dict(tensors)
    return task.eval(), described


def test_reference_logits(tmp_path):
    source = _save(tmp_path / "tiny.npz", _tiny_arrays())
    assert from_google(source, tmp_path / "native") < 5e-5  # float32: these weights make nearly constant tokens
    task, described = _load(tmp_path / "native")
    assert task.backbone.config == ViTConfig(width=8, depth=2, heads=2, mlp=16, patch=4, res=8)
    assert described["classes"] is None
    assert described["pixels"]["mean"] == [0.5, 0.5, 0.5]
    logits = task.objective.logits(task.backbone(formula((2, 8, 8, 3), 1, 0.1).float()))
    expected = torch.tensor(CASE["logits_gelu_tanh"], dtype=torch.float64)
    torch.testing.assert_close(logits.double(), expected, rtol=0, atol=CASE["tol"])


def test_independent_computation_gives_the_reference_logits(tmp_path):
    source = _save(tmp_path / "tiny.npz", _tiny_arrays())
    _, logits = google.reference(source, formula((2, 8, 8, 3), 1, 0.1).float())
    expected = torch.tensor(CASE["logits_gelu_tanh"], dtype=torch.float64)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)


def test_there_and_back_is_bit_equal(tmp_path):
    arrays = _tiny_arrays()
    from_google(_save(tmp_path / "tiny.npz", arrays), tmp_path / "native")
    to_google(tmp_path / "native", tmp_path / "back.npz")
    _equal(tmp_path / "back.npz", arrays)


def test_representation_layer_goes_along(tmp_path, write):
    folder, task = write(schema.Supervised(representation=True))
    assert to_google(folder, tmp_path / "model.npz") < 1e-5
    with np.load(tmp_path / "model.npz") as archive:
        assert archive["pre_logits/kernel"].shape == (12, 12)
    from_google(tmp_path / "model.npz", tmp_path / "back")
    images = torch.randint(0, 256, (2, 16, 16, 3), dtype=torch.uint8)
    assert torch.equal(_load(tmp_path / "back")[0].predict(images), task.predict(images))


@pytest.mark.parametrize("pool", ["tok", "gap"])
@pytest.mark.parametrize("pos_embed", ["learned", "sincos2d", "none"])
def test_pooling_and_positions(tmp_path, write, pool, pos_embed):
    folder, task = write(pool=pool, pos_embed=pos_embed)
    done = convert(folder, tmp_path / "model.npz", "google")
    assert done.difference < 1e-5
    assert any("positions" in note for note in done.notes) == (pos_embed != "learned")
    with np.load(tmp_path / "model.npz") as archive:
        assert ("cls" in archive.files) == (pool == "tok")
    from_google(tmp_path / "model.npz", tmp_path / "back")
    images = torch.randint(0, 256, (2, 16, 16, 3), dtype=torch.uint8)
    torch.testing.assert_close(_load(tmp_path / "back")[0].predict(images), task.predict(images))


def test_what_is_left_out_is_said(tmp_path, write):
    folder, _ = write(
        schema.Supervised(loss="sigmoid"), dropout=0.1, pixels={"crop": {"kind": "short_crop", "short": 20}}
    )
    notes = " ".join(convert(folder, tmp_path / "model.npz", "google").notes)
    for word in ("class names", "crop", "dropout", "sigmoid"):
        assert word in notes


def test_without_a_classification_head(tmp_path, write):
    folder, _ = write(schema.Mpp())
    done = convert(folder, tmp_path / "model.npz", "google")
    assert done.num_classes == 0
    assert "mpp" in done.notes[0]
    with np.load(tmp_path / "model.npz") as archive:
        assert not [name for name in archive.files if name.startswith(("head", "pre_logits", "mask"))]
    from_google(tmp_path / "model.npz", tmp_path / "back")
    assert checkpoint.read_config(tmp_path / "back")["objective"] is None
    tensors = checkpoint.load_tensors(tmp_path / "back")
    original = checkpoint.load_tensors(folder)
    assert all(torch.equal(value, original[name]) for name, value in tensors.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gelu": "erf"}, "gelu: erf"),
        ({"norm_eps": 1e-5}, "epsilon"),
        ({"res": (16, 20)}, "square images"),
        ({"pixels": {"mean": [0.485, 0.456, 0.406]}}, "mean"),
    ],
)
def test_what_has_no_place_is_refused(tmp_path, write, options, message):
    folder, _ = write(**options)
    with pytest.raises(VitptError, match=message):
        to_google(folder, tmp_path / "model.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["native"]


def _linen(arrays):
    names = {"LayerNorm_2": "LayerNorm_1", "MultiHeadDotProductAttention_1": "MultiHeadDotProductAttention_0"}
    names["MlpBlock_3"] = "MlpBlock_0"
    return {"/".join(names.get(part, part) for part in name.split("/")): value for name, value in arrays.items()}


def _stacked(arrays):
    out = {name: value for name, value in arrays.items() if "encoderblock_" not in name}
    first = "Transformer/encoderblock_0/"
    for name in [name for name in arrays if name.startswith(first)]:
        rest = name.removeprefix(first)
        both = [arrays[f"Transformer/encoderblock_{i}/{rest}"] for i in range(2)]
        out[f"Transformer/encoderblock/{rest}"] = np.stack(both)
    return out


@pytest.mark.parametrize("prefix", ["", "opt/target/", "params/", "params/img/"])
@pytest.mark.parametrize("layout", [lambda arrays: arrays, _linen, lambda arrays: _stacked(_linen(arrays))])
def test_other_names(tmp_path, prefix, layout):
    arrays = _tiny_arrays()
    other = {f"{prefix}{name}": value for name, value in layout(arrays).items()}
    other |= {"opt/state/step": np.zeros(1, np.int32)} if prefix else {}
    from_google(_save(tmp_path / "other.npz", other), tmp_path / "native")
    to_google(tmp_path / "native", tmp_path / "back.npz")
    _equal(tmp_path / "back.npz", arrays)


def test_big_vision_positions_have_no_row_for_the_class_token(tmp_path):
    arrays = _tiny_arrays()
    arrays[google.POSITIONS][:, 0] = 0
    other = _linen(arrays)
    other["pos_embedding"] = other.pop(google.POSITIONS)[:, 1:]
    from_google(_save(tmp_path / "other.npz", other), tmp_path / "native")
    to_google(tmp_path / "native", tmp_path / "back.npz")
    _equal(tmp_path / "back.npz", arrays)


def _change(**changes):
    return {**_tiny_arrays(), **changes}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (_change(**{"MAPHead_0/probe": np.zeros((1, 1, 8), np.float32)}), "MAPHead_0/probe"),
        (_change(**{"head/bias": np.zeros(5, np.float64)}), "head/bias is float64"),
        (_change(**{"head/bias": np.zeros(5, np.int32)}), "head/bias is int32"),
        (_change(**{"head/bias": np.array([None])}), "not a readable .npz file"),
        (_change(**{google.POSITIONS: np.zeros((1, 7, 8), np.float32)}), "7 rows of positions"),
        (_change(**{"head/kernel": np.zeros((7, 5), np.float32)}), "head/kernel|head.weight"),
        (_change(**{"embedding/bias": np.zeros(9, np.float32)}), "patch_embed.proj.bias"),
        (_change(**{"embedding/bias": np.full(8, np.nan, np.float32)}), "computes something else"),
        ({"a": np.zeros(1, np.float32)}, "not a plain Vision Transformer"),
    ],
)
def test_files_that_hold_something_else_are_refused(tmp_path, arrays, message):
    source = _save(tmp_path / "other.npz", arrays)
    with pytest.raises(VitptError, match=message) as error:
        from_google(source, tmp_path / "native")
    assert error.value.exit_code == Exit.DATA
    assert [path.name for path in tmp_path.iterdir()] == ["other.npz"]


@pytest.mark.parametrize("content", [b"", b"not an archive", b"PK\x03\x04 cut"])
def test_damaged_file(tmp_path, content):
    (tmp_path / "bad.npz").write_bytes(content)
    with pytest.raises(VitptError, match=r"not a readable \.npz file"):
        from_google(tmp_path / "bad.npz", tmp_path / "native")


def test_missing_array(tmp_path):
    arrays = _tiny_arrays()
    del arrays["Transformer/encoderblock_1/LayerNorm_0/bias"]
    with pytest.raises(VitptError, match="encoderblock_1/LayerNorm_0/bias is missing"):
        from_google(_save(tmp_path / "cut.npz", arrays), tmp_path / "native")


def test_head_can_be_dropped(tmp_path, write):
    folder, _ = write()
    done = convert(folder, tmp_path / "model.npz", "google", drop_head=True)
    assert done.num_classes == 0
    assert "the classification head is left out" in done.notes
    with np.load(tmp_path / "model.npz") as archive:
        assert "head/kernel" not in archive.files


def test_names_of_the_destination(tmp_path, write):
    folder, _ = write()
    with pytest.raises(VitptError, match=r"ends in \.npz"):
        to_google(folder, tmp_path / "model")
    (tmp_path / "taken.npz").write_bytes(b"mine")
    with pytest.raises(VitptError, match="exists already"):
        to_google(folder, tmp_path / "taken.npz")
    assert (tmp_path / "taken.npz").read_bytes() == b"mine"
    with pytest.raises(VitptError, match="native model already"):
        from_google(folder, tmp_path / "copy")
    with pytest.raises(VitptError, match="no such file or folder") as error:
        from_google(tmp_path / "nothing.npz", tmp_path / "copy")
    assert error.value.exit_code == Exit.USAGE


def test_classes_of_the_fixture_are_written(write):
    folder, task = write()
    assert checkpoint.read_config(folder)["classes"] == CLASSES
    assert task.objective.num_classes == len(CLASSES)
