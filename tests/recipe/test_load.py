"""Recipes: what is read, and what every kind of mistake is answered with."""

import os
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from vitpt.errors import VitptError
from vitpt.recipe.load import dump_yaml, find_recipe, load_recipe, read_recipe, require_model, shipped_recipes
from vitpt.recipe.names import ALIASES, all_keys
from vitpt.recipe.read import specs
from vitpt.recipe.schema import Recipe

# line numbers matter: each case below appends to or replaces a line of this recipe
GOOD = """\
name: good
data: {path: photos-shards}
model: {name: vit_b16, res: 224}
objective: {kind: mpp}
optim: {kind: adamw, lr: 1e-3}
schedule: {kind: cosine, warmup_steps: 10}
train: {steps: 100, global_batch_size: 8}
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Return a function: text and overrides to the loaded recipe, or the error's lines."""
    monkeypatch.chdir(tmp_path)

    def load(text, *overrides):
        Path("r.yaml").write_text(text)
        return load_recipe("r.yaml", overrides)

    return load


def errors(load, text, *overrides):
    with pytest.raises(VitptError) as caught:
        load(text, *overrides)
    assert caught.value.exit_code == 2
    return str(caught.value).split("\n")


def with_line(number, line):
    lines = GOOD.split("\n")
    lines[number - 1] = line
    return "\n".join(lines)


def test_good_recipe_and_defaults(load):
    loaded = load(GOOD)
    recipe = loaded.recipe
    assert (recipe.name, recipe.seed, recipe.optim.lr, recipe.train.steps) == ("good", 0, 1e-3, 100)
    assert recipe.objective.kind == "mpp"
    assert recipe.data.crop.area == (0.05, 1.0)
    assert recipe.ema is None
    assert (loaded.path, loaded.text) == (Path("r.yaml"), GOOD)
    assert recipe.model.model_fields_set == {"name", "res"}  # fine-tuning must tell written values from defaults


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3), ("3e-4", 3e-4), ("2.5E-4", 2.5e-4), ("1e+3", 1000.0), (".5", 0.5), ("1_000", 1000.0), ("2.", 2.0),
        ("+0.1", 0.1), ("1.0e-3", 1e-3), ("7", 7.0),
    ],
)  # fmt: skip
def test_numbers(load, text, value):
    lr = load(with_line(5, f"optim: {{kind: adamw, lr: {text}}}")).recipe.optim.lr
    assert lr == value
    assert isinstance(lr, float)


@pytest.mark.parametrize(("text", "value"), [("10_000", 10_000), ("1e5", 100_000), ("2.5e3", 2500), ("100", 100)])
def test_integers(load, text, value):
    steps = load(with_line(7, f"train: {{steps: {text}, global_batch_size: 8}}")).recipe.train.steps
    assert steps == value
    assert isinstance(steps, int)


@pytest.mark.parametrize(
    "text", ["no", "on", "010", "12:30", "2026-01-01", "1e-3", "0x10", "true", "nan", '"null"', "-1 x", "ja: nein"]
)
def test_text_is_what_is_written(load, text):
    plain = text.strip('"')
    shown = f'"{text}"' if ": " in text else text
    path = load(with_line(2, f"data: {{path: {shown}}}")).recipe.data.path
    assert path == plain


def test_null_and_booleans(load):
    text = GOOD + "eval: null\n"
    assert load(text).recipe.eval is None
    assert load(with_line(5, "optim: {kind: adamw, lr: 1, clip_grad_norm: ~}")).recipe.optim.clip_grad_norm is None
    assert load(with_line(2, "data: {path: x, labelled_only: true}")).recipe.data.labelled_only is True


WRONG = [
    # types
    (5, "optim: {kind: adamw, lr: fast}", '5:26: optim.lr: found "fast"; expected a number > 0'),
    (5, "optim: {kind: adamw, lr: nan}", '5:26: optim.lr: found "nan"; a number must be finite; expected a number > 0'),
    (5, "optim: {kind: adamw, lr: .inf}", '5:26: optim.lr: found ".inf"; a number must be finite; expected a number > 0'),
    (5, "optim: {kind: adamw, lr: 1e999}", '5:26: optim.lr: found "1e999"; a number must be finite; expected a number > 0'),
    (5, "optim: {kind: adamw, lr: '1e-3'}", '5:26: optim.lr: found "1e-3"; a number is written without quotes; expected a number > 0'),
    (5, "optim: {kind: adamw, lr: 010}", '5:26: optim.lr: found "010"; a number has no leading zero; expected a number > 0'),
    (5, "optim: {kind: adamw, lr: 12:30}", '5:26: optim.lr: found "12:30"; expected a number > 0'),
    (5, "optim: {kind: adamw, lr: 2026-01-01}", '5:26: optim.lr: found "2026-01-01"; expected a number > 0'),
    (5, "optim: {kind: adamw, lr: no}", '5:26: optim.lr: found "no"; expected a number > 0'),
    (5, "optim: {kind: adamw, lr: true}", '5:26: optim.lr: found "true"; expected a number > 0'),
    (5, "optim: {kind: adamw, lr: [1]}", "5:26: optim.lr: found a list of 1; expected a number > 0"),
    (5, "optim: {kind: adamw, lr: }", "5:26: optim.lr: nothing is written; expected a number > 0"),
    (5, "optim: {kind: adamw, lr: null}", "5:26: optim.lr: found null; expected a number > 0"),
    (5, "optim: {kind: adamw, lr: 0}", '5:26: optim.lr: found "0"; expected a number > 0'),
    (5, "optim: {kind: adamw, lr: 1, betas: [0.9, 1]}", '5:42: optim.betas: found "1"; expected a number >= 0 and < 1'),
    (5, "optim: {kind: adamw, lr: 1, betas: [0.9]}", "5:36: optim.betas: found a list of 1; expected a list of 2 numbers >= 0 and < 1"),
    (7, "train: {steps: 1.5, global_batch_size: 8}", '7:16: train.steps: found "1.5"; expected an integer >= 1 or null'),
    (7, "train: {steps: 100, global_batch_size: 8, micro_batch_size: atuo}",
     '7:61: train.micro_batch_size: found "atuo"; did you mean auto? expected auto or an integer >= 1'),
    (2, "data: {path: x, labelled_only: no}", '2:32: data.labelled_only: found "no"; did you mean false? expected true or false'),
    (2, "data: {path: x, flip: horizontl}",
     '2:23: data.flip: found "horizontl"; did you mean horizontal? expected one of none, horizontal, both'),
    (2, "data: {path: null}", "2:14: data.path: found null; expected text"),
    (2, "data: photos", '2:7: data: found "photos"; expected a mapping of keys'),
    (2, "data:", "2:6: data: found nothing; expected a mapping of keys (leave the section out for its defaults)"),
    (2, "data: {path: x, crop: squash}", '2:23: data.crop: found "squash"; expected a mapping such as {kind: random_resized}'),
    (1, "name: a/b", '1:7: name: found "a/b"; expected a folder\'s name: up to 100 bytes, no slashes, not starting with . or -'),
    # keys
    (5, "optim: {kind: adamw, lr: 1, lrr: 2}", "5:29: optim.lrr: unknown key; did you mean optim.lr?"),
    (5, "optim: {kind: adamw, lr: 1, lr: 2}", "5:29: optim.lr: given twice, first at line 5"),
    (5, "optim: {kind: adamw, lr: 1, momentum: 0.9}",
     "5:29: optim.momentum: belongs to another kind than adamw, which has kind, lr, betas, eps, weight_decay, clip_grad_norm"),
    (5, "optim: {kind: adam, lr: 1}", '5:15: optim.kind: found "adam"; did you mean adamw? expected one of adamw, sgd'),
    (5, "optim: {lr: 1}", "5:1: optim.kind: missing; expected one of adamw, sgd"),
    (5, "optim: {kind: sgd}", "5:1: optim.lr: missing; expected a number > 0: peak learning rate, for the recipe's global batch"),
    (5, "", "1:1: optim: missing; expected a section with kind: adamw or sgd"),
    (7, "train: {steps: 100, global_batch_size: 8, lr: 1}", "7:43: train.lr: unknown key; did you mean optim.lr?"),
    (7, "train: {steps: 100, global_batch_size: 8, warmup_step: 1}",
     "7:43: train.warmup_step: unknown key; did you mean schedule.warmup_steps?"),
    (7, "train: {steps: 100, global_batch_size: 8, zzz: 1}",
     "7:43: train.zzz: unknown key; expected one of steps, epochs, global_batch_size, micro_batch_size, precision"),
    # relations
    (3, "model: {name: ViT-B/16}", '3:15: model.name: found "ViT-B/16"; did you mean vit_b16? (vit_<ti|s|b|l|h><patch side>)'),
    (3, "model: {name: vit_base_patch32_224}",
     '3:15: model.name: found "vit_base_patch32_224"; did you mean vit_b32? (vit_<ti|s|b|l|h><patch side>)'),
    (3, "model: {name: vit_x16}", '3:15: model.name: found "vit_x16"; did you mean vit_s16? (vit_<ti|s|b|l|h><patch side>)'),
    (3, "model: {name: vit_b16, res: 220}",
     "3:29: model.res: 220 is not a multiple of the patch side 16 of model.name = vit_b16 (line 3); the nearest sizes are 208 and 224"),
    (3, "model: {name: vit_b16, depth: 3}",
     "3:31: model.depth: given beside model.name = vit_b16 (line 3); take either name or all of width, depth, heads, mlp, patch,"
     " not model.depth with a name"),
    (3, "model: {width: 64, heads: 4, mlp: 256, patch: 8}",
     "3:16: model.width: a model by number needs all of width, depth, heads, mlp, patch; missing: model.depth"),
    (3, "model: {width: 64, depth: 2, heads: 3, mlp: 256, patch: 8}", "3:16: model.width: 64 is not a multiple of model.heads = 3 (line 3)"),
    (3, "model: {width: 6, depth: 2, heads: 3, mlp: 256, patch: 8, pos_embed: sincos2d}",
     "3:16: model.width: 6 is not a multiple of 4, as model.pos_embed = sincos2d (line 3) needs"),
    (6, "schedule: {warmup_steps: 101}", "6:26: schedule.warmup_steps: 101 is more than train.steps = 100 (line 7)"),
    (6, "schedule: {end_lr: 1}", "6:20: schedule.end_lr: 1 is more than the peak optim.lr = 0.001 (line 5)"),
    (7, "train: {steps: 100, epochs: 2, global_batch_size: 8}",
     "7:29: train.epochs: given beside train.steps = 100 (line 7); take exactly one (-o train.steps=null takes the other back)"),
    (7, "train: {global_batch_size: 8}", "7:8: train: exactly one of train.steps and train.epochs is needed"),
    (2, "data: {path: x, crop: {kind: random_resized, area: [1, 0.5]}}",
     "2:52: data.crop.area: the smallest value 1 comes before the largest 0.5: they are in the wrong order"),
    (2, "data: {path: x, crop: {kind: short_crop, short: 200}}",
     "2:49: data.crop.short: 200 is less than model.res = 224 (line 3): no square of that size is left to cut"),
    (4, "objective: {kind: mpp, shares: [0.8, 0.1, 0.2]}", "4:32: objective.shares: [0.8, 0.1, 0.2] sum to 1.1; expected 1"),
    (4, "objective: {kind: mpp, norm_pix: true}",
     "4:34: objective.norm_pix: only with target: pixels; found objective.target = mean_color_3bit (default)"),
    (4, "objective: {kind: supervised, head_bias: -10}",
     "4:42: objective.head_bias: only with loss: sigmoid; found objective.loss = softmax (default)"),
    (6, "eval: {metric: loss}", '6:16: eval.metric: found "loss"; did you mean val/loss? (<eval.split>/<metric of the objective>: '
     "val/loss, val/accuracy, val/loss_mask, val/loss_random, val/loss_keep, val/accuracy_mask, val/accuracy_random, val/accuracy_keep)"),
    (6, "eval: {metric: val/accuracy}", "6:7: eval.mode: min would keep the worst checkpoint by eval.metric = val/accuracy (line 6); expected max"),
    # YAML
    (6, "schedule: &a {kind: cosine}", "6:11: anchors and aliases (& and *) are not supported; write the value out"),
    (6, "schedule: {<<: 3}", '6:12: schedule."<<": merge keys (<<) are not supported; write the values out'),
    (6, "seed: !!int 3", '6:7: tags ("tag:yaml.org,2002:int") are not supported; the field decides on the type'),
    (6, "schedule: {kind: cosine", "7:6: not valid YAML: did not find expected ',' or '}'"),
    (6, "a: b: c", "6:5: not valid YAML: mapping values are not allowed in this context"),
    (6, "---", "6:1: not valid YAML: expected a single document in the stream but found another document"),
    (6, "? [a]\n: 3", "6:3: a key must be a word"),
    (6, "seed: " + "[" * 50 + "]" * 50, "6:26: nested deeper than 20 levels; not a recipe"),
]  # fmt: skip


@pytest.mark.parametrize(("number", "line", "expected"), WRONG)
def test_wrong_recipes(load, number, line, expected):
    found = errors(load, with_line(number, line))
    assert f"r.yaml:{expected}" in found
    assert len(found) <= 2


@pytest.mark.parametrize(
    ("line", "suggestion"),
    [
        ("learning_rate: 1", "optim.lr"),
        ("wd: 1", "optim.weight_decay"),
        ("img_size: 1", "model.res"),
        ("mask_ratio: 1", "objective.corrupt"),
        ("clip_grad: 1", "optim.clip_grad_norm"),
        ("steps: 1", "train.steps"),
        ("every_steps: 1", "eval.every_steps, save.every_steps or log.every_steps"),
        ("Seed: 1", "seed"),
        ("optimizer: {lr: 3}", "optim"),
        ("learning_rat: 1", "optim.lr"),
    ],
)
def test_unknown_key_names_the_nearest(load, line, suggestion):
    key = line.partition(":")[0]
    expected = [f"r.yaml:8:1: {key}: unknown key; did you mean {suggestion}?"]
    assert [text.partition(" (")[0] for text in errors(load, GOOD + line)] == expected


def test_batch_size_says_that_it_is_global(load):
    (line,) = errors(load, with_line(7, "train: {steps: 100, global_batch_size: 8, batch_size: 8}"))
    assert "did you mean train.global_batch_size?" in line
    assert "over all processes" in line


def test_dotted_key_at_the_top(load):
    assert errors(load, GOOD + "optim.eps: 1e-6") == [
        'r.yaml:8:1: "optim.eps": unknown key; write eps below optim, as optim: {eps: ...}'
    ]


def test_every_alias_points_to_a_key():
    assert set(ALIASES.values()) <= set(all_keys())
    assert not [alias for alias in ALIASES if alias in all_keys()]


def test_all_errors_in_line_order_then_overrides(load):
    text = with_line(7, "train: {steps: -1, global_batch_size: 8}").replace("lr: 1e-3", "lrr: 1e-3")
    found = errors(load, text, "seed=-1", "optm.lr=3")
    assert found == [
        "r.yaml:5:1: optim.lr: missing; expected a number > 0: peak learning rate, for the recipe's global batch",
        "r.yaml:5:22: optim.lrr: unknown key; did you mean optim.lr?",
        'r.yaml:7:16: train.steps: found "-1"; expected an integer >= 1 or null',
        '-o seed=-1: seed: found "-1"; expected an integer >= 0 and < 4294967296',
        "-o optm.lr=3: optm: unknown key; did you mean optim?",
    ]


def test_overrides(load):
    recipe = load(
        GOOD, "optim.lr=2e-4", "train.steps=null", "train.epochs=2.5", "data.crop={kind: squash}", "ema.decay=0.9", "eval=null",
        "log.trackers=[tensorboard]", "seed=3", "seed=4", "name=a=b",
    ).recipe  # fmt: skip
    assert recipe.optim.lr == 2e-4
    assert (recipe.train.steps, recipe.train.epochs) == (None, 2.5)
    assert recipe.data.crop.kind == "squash"
    assert recipe.ema is not None
    assert recipe.ema.decay == 0.9
    assert recipe.eval is None
    assert recipe.log.trackers == ("tensorboard",)
    assert recipe.seed == 4
    assert recipe.name == "a=b"


def test_override_of_a_default_sections_field_keeps_its_kind(load):
    assert load(GOOD, "data.crop.area=[0.5, 1]").recipe.data.crop.area == (0.5, 1.0)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim.lrr=1", "-o optim.lrr=1: optim.lrr: unknown key; did you mean optim.lr?"),
        ("lr=1", "-o lr=1: lr: unknown key; did you mean optim.lr?"),
        ("optim.lr", "-o optim.lr: expected KEY=VALUE, such as optim.lr=1e-3"),
        ("=1", "-o =1: expected KEY=VALUE, such as optim.lr=1e-3"),
        ("optim..lr=1", "-o optim..lr=1: expected KEY=VALUE, such as optim.lr=1e-3"),
        ("optim.lr=", "-o optim.lr=: optim.lr: nothing is written; expected a number > 0"),
        ("optim.lr=fast", '-o optim.lr=fast: optim.lr: found "fast"; expected a number > 0'),
        ("data.mean=[1", "-o data.mean=[1: not valid YAML: did not find expected ',' or ']'"),
        ("data.path.x=1", "-o data.path.x=1: data.path: has no keys below it"),
        ("schedule.warmup_steps=200", "-o schedule.warmup_steps=200: schedule.warmup_steps: 200 is more than train.steps = 100 (line 7)"),
        ("model.res=225",
         "-o model.res=225: model.res: 225 is not a multiple of the patch side 16 of model.name = vit_b16 (line 3); the nearest sizes are 224 and 240"),
    ],
)  # fmt: skip
def test_wrong_overrides(load, override, expected):
    assert errors(load, GOOD, override) == [expected]


def test_override_of_a_kind_says_how_to_replace_the_section(load):
    text = with_line(2, "data: {path: x, crop: {kind: random_resized, area: [0.5, 1]}}")
    (line,) = errors(load, text, "data.crop.kind=squash")
    assert line.startswith("r.yaml:2:46: data.crop.area: belongs to another kind than squash")
    assert "-o 'data.crop={kind: squash}'" in line


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"", "r.yaml:1:1: the file is empty; expected a recipe"),
        (b"# nothing\n", "r.yaml:1:1: the file is empty; expected a recipe"),
        (b"- a\n- b\n", "r.yaml:1:1: found a list of 2; expected a mapping of keys"),
        (b"just words", 'r.yaml:1:1: found "just words"; expected a mapping of keys'),
        (b"root: 1\nuser: 2\n", "r.yaml:1:1: not a recipe: none of its keys is one of name, seed, finetune, data, model, objective,"),
        (b"name: x\nseed: \xff\n", "r.yaml:2:7: not UTF-8 (byte 0xff); expected YAML in UTF-8"),
        (b"name: x\nseed: \x1b[31m\n", "r.yaml:2:7: control character 0x1b; expected YAML text"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "r.yaml: a binary file, not a recipe (expected YAML in UTF-8)"),
        (b"# x\n" * 300_000, "r.yaml: larger than 1048576 bytes; not a recipe"),
        (b"name: x\ndata:\n\tpath: y\n", "r.yaml:3:1: not valid YAML: found character that cannot start any token"),
    ],
)  # fmt: skip
def test_files_that_are_no_recipe(tmp_path, monkeypatch, raw, expected):
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_bytes(raw)
    with pytest.raises(VitptError) as caught:
        load_recipe("r.yaml")
    assert str(caught.value).startswith(expected)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_deep_nesting_of_any_depth_is_one_line(load):
    for depth in (30, 2_000, 200_000):
        (line,) = errors(load, GOOD + "seed: " + "[" * depth)
        assert line.startswith("r.yaml:8:")


def test_byte_order_mark_and_windows_lines(load):
    assert load("\ufeff" + GOOD.replace("\n", "\r\n")).recipe == load(GOOD).recipe


def test_a_file_name_with_control_characters_stays_on_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a\nb.yaml").write_text("nmae: x\nname: y")
    with pytest.raises(VitptError) as caught:
        load_recipe("a\nb.yaml")
    assert all(line.startswith("a\\nb.yaml:") for line in str(caught.value).split("\n"))


def test_find_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = shipped_recipes()["quickstart"]
    for name in ("quickstart", "quickstart.yaml", "recipes/quickstart", "recipes/quickstart.yaml"):
        assert find_recipe(name) == shipped
    Path("quickstart").mkdir()  # a folder of that name, such as somebody's run, is not a recipe
    assert find_recipe("quickstart") == shipped
    Path("quickstart.yaml").write_text(GOOD)  # an existing file comes first
    assert find_recipe("quickstart.yaml") == Path("quickstart.yaml")


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        (
            "quikstart",
            '"quikstart": no such file and no such shipped recipe',
            "Did you mean quickstart or quickstart_finetune?",
        ),
        ("conf/vit_b16_mp.yaml", '"conf/vit_b16_mp.yaml": no such file', "Did you mean vit_b16_mpp"),
        ("zzzzzz", '"zzzzzz": no such file', "Shipped recipes: eurosat_finetune, "),
        ("", '"": no such file', "Shipped recipes: "),
        (".", '".": is a folder, not a recipe', "Shipped recipes: "),
        ("x" * 300, '"xxx', ""),
        ("a\nb", '"a\\nb": no such file', ""),
    ],
)
def test_recipe_not_found(tmp_path, monkeypatch, name, message, hint):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(VitptError) as caught:
        find_recipe(name)
    assert caught.value.message.startswith(message)
    assert (caught.value.hint or "").startswith(hint)
    assert caught.value.exit_code == 2


@pytest.mark.skipif(not hasattr(os, "mkfifo") or os.geteuid() == 0, reason="root may read every file")
def test_unreadable_file(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(GOOD)
    path.chmod(0)
    with pytest.raises(VitptError, match="cannot be read: Permission denied"):
        load_recipe(path)


def test_require_model(load):
    require_model(load(GOOD).recipe)
    with pytest.raises(VitptError, match="neither name nor width, depth, heads, mlp, patch"):
        require_model(load(with_line(3, "model: {res: 384}")).recipe)
    with pytest.raises(VitptError, match="neither name nor width"):
        require_model(load(with_line(3, "")).recipe)


def test_no_heavy_import():
    heavy = {"torch", "numpy", "webdataset", "accelerate"}
    code = f"import sys, vitpt.recipe.load; print(sorted({heavy!r} & set(sys.modules)))"
    import subprocess

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_shipped_recipes(name):
    loaded = load_recipe(name)
    assert loaded.recipe.name == name
    comment = loaded.text.split("name:", 1)[0]
    for word in ("# Paper:", "vitpt ", name, "# Hardware:", "# Time:", "# Metric:"):
        assert word in comment
    if not loaded.recipe.data.path.startswith("bundled:"):
        assert f"{loaded.recipe.data.path} " in comment.split("vitpt shard", 1)[1].split("\n", 1)[0]
    if loaded.recipe.finetune:
        assert load_recipe(loaded.recipe.finetune).recipe.objective.kind == "supervised"


def test_shipped_recipes_are_the_papers():
    mpp = load_recipe("vit_b16_mpp").recipe
    assert (mpp.train.steps, mpp.train.global_batch_size, mpp.optim.lr, mpp.schedule.warmup_steps) == (
        100_000,
        4096,
        2e-4,
        10_000,
    )
    assert (mpp.schedule.kind, mpp.schedule.end_lr, mpp.optim.weight_decay, mpp.optim.clip_grad_norm) == (
        "cosine",
        0,
        0.1,
        1,
    )
    in21k = load_recipe("vit_b16_sup_in21k").recipe
    assert (in21k.train.epochs, in21k.optim.lr, in21k.optim.weight_decay, in21k.model.dropout) == (90, 1e-3, 0.03, 0.1)
    assert (in21k.schedule.kind, in21k.schedule.end_lr, in21k.objective.loss, in21k.objective.head_bias) == (
        "linear",
        1e-5,
        "sigmoid",
        -10,
    )
    in1k = load_recipe("vit_b16_sup_in1k").recipe
    assert (in1k.train.epochs, in1k.optim.lr, in1k.optim.weight_decay, in1k.model.dropout) == (300, 3e-3, 0.3, 0.1)
    finetune = load_recipe("finetune_in1k_384").recipe
    assert (finetune.optim.kind, finetune.optim.lr, finetune.train.steps, finetune.train.global_batch_size) == (
        "sgd",
        0.03,
        20_000,
        512,
    )
    assert (finetune.model.res, finetune.optim.weight_decay, finetune.schedule.warmup_steps) == (384, 0, 500)
    assert finetune.eval is not None
    assert finetune.eval.crop.kind == "squash"


_words = st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters="/\\.-"), min_size=1, max_size=20)


@settings(max_examples=60, deadline=None)
@given(
    name=_words,
    path=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30),
    lr=st.floats(1e-300, 1e300),
    seed=st.integers(0, 2**32 - 1),
    epochs=st.floats(1e-6, 1e6),
    clip=st.none() | st.floats(1e-9, 1e9),
    crop=st.sampled_from(
        [{"kind": "squash"}, {"kind": "short_crop", "short": 300}, {"kind": "random_resized", "area": [1e-9, 0.1]}]
    ),
    evaluate=st.booleans(),
)
def test_dump_reads_back_equal(tmp_path_factory, name, path, lr, seed, epochs, clip, crop, evaluate):
    recipe = Recipe.model_validate(
        {
            "name": name,
            "seed": seed,
            "data": {"path": path, "crop": crop},
            "model": {"name": "vit_b16"},
            "objective": {"kind": "mpp"},
            "optim": {"kind": "adamw", "lr": lr, "clip_grad_norm": clip},
            "train": {"epochs": epochs, "global_batch_size": 8},
        }
        | ({} if evaluate else {"eval": None})
    )
    file = tmp_path_factory.mktemp("dump") / "r.yaml"
    file.write_bytes(dump_yaml(recipe).encode())
    assert load_recipe(file).recipe == recipe


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet=st.sampled_from("abnul:{}[],&*!|>'\"#%@`-?~ \n\t0129.eE+_<=é\ufeff\x85"), max_size=60))
def test_any_text_is_a_recipe_or_one_clean_error(text):
    recipe, problems = read_recipe(GOOD + text, "any.yaml")
    assert (recipe is None) == bool(problems)
    assert all(str(problem).startswith("any.yaml:") and str(problem).isprintable() for problem in problems)


def _python_float(text):
    """Read a number as Python does; None for what a recipe refuses: odd zeros, long exponents, nothing finite."""
    digits, _, exponent = text.lstrip("+-").lower().partition("e")
    odd_zero = digits.startswith("0") and digits[1:2] not in ("", ".")
    try:
        value = float(text)
    except ValueError:
        return None
    return (
        None
        if odd_zero or "_" in text.partition(".")[2] or len(exponent.lstrip("+-")) > 4 or abs(value) == float("inf")
        else value
    )


@settings(max_examples=300, deadline=None)
@given(text=st.from_regex(r"\A[-+]?[0-9._]{1,6}([eE][-+0-9]{1,4})?\Z"))
def test_numbers_agree_with_python(text):
    recipe, _ = read_recipe(with_line(2, f"data: {{path: x, mean: [0, 0, {text}]}}"), "number.yaml")
    assert (recipe.data.mean[2] if recipe else None) == _python_float(text)


def test_every_field_can_be_read():
    """Each type in the schema has a reader: a new kind of annotation must not pass unnoticed."""
    from vitpt.recipe.read import describe

    def walk(section):
        for field in section.model_fields.values():
            from vitpt.recipe.names import sections_of

            if below := sections_of(field):
                for inner in below:
                    walk(inner)
            else:
                assert describe(specs(field.annotation))

    walk(Recipe)


def test_dump_is_plain_yaml(load):
    assert yaml.safe_load(dump_yaml(load(GOOD).recipe))["optim"]["lr"] == 1e-3
