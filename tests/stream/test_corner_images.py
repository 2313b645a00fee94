"""Odd, broken and hostile files: every engine takes the same ones, gives the same pictures, and none ends the process."""

import json

from making import in_child, shared_data

from vitpt.stream.gate import nvimgcodec

ALL_ENGINES = """
import json, sys
from making import *
import torch
from vitpt.image import ImageError, read_header, turned_size
from vitpt.recipe.schema import Squash
from vitpt.stream.decode_cpu import CpuDecoder
from vitpt.stream.decode_dali import DaliDecoder
from vitpt.stream.gate import nvimgcodec
from vitpt.stream.views import evaluation_view, stored

folder = Path(sys.argv[1])
names = sys.argv[2:]
files, sizes = [], []
for name in names:
    files.append((folder / name).read_bytes())
    try:
        header = read_header(files[-1])
        sizes.append((header.width, header.height, header.orientation))
    except ImageError:
        sizes.append((64, 48, 1))
    if sizes[-1][0] * sizes[-1][1] > 2**24:  # decodes, but not in a test's time
        files[-1] = None
stored_w, stored_h, orient = np.array(sizes).T
upright_w, upright_h = np.where(orient >= 5, stored_h, stored_w), np.where(orient >= 5, stored_w, stored_h)
view = stored(evaluation_view(Squash(), 48, upright_w, upright_h, orient), stored_w, stored_h)
decoders = [CpuDecoder(None)]
if nvimgcodec() is not None:
    decoders += [CpuDecoder(nvimgcodec()), DaliDecoder(len(files), 2, torch.device("cpu"))]
pictures, bad = [], []
for decoder in decoders:
    out = torch.empty(len(files), 48, 48, 3, dtype=torch.uint8)
    bad.append([row for row, _ in decoder.decode(files, view, out).bad])
    pictures.append(out.float())
difference = max(float((one - pictures[0]).abs().mean(dim=(1, 2, 3)).max()) for one in pictures)
print(json.dumps({"bad": [[names[row] for row in rows] for rows in bad], "difference": difference}))
"""


def test_all_engines_agree_on_corner_images():
    folder = shared_data("corner_images")
    wanted = {image["file"]: image["expect"] for image in json.loads(shared_data("corner_images.json").read_text())}
    found = json.loads(in_child(ALL_ENGINES, str(folder), *wanted).splitlines()[-1])
    assert len(found["bad"]) == (1 if nvimgcodec() is None else 3)
    assert all(names == found["bad"][0] for names in found["bad"])
    assert not [name for name in found["bad"][0] if wanted[name] == "keep"]
    assert len(found["bad"][0]) > 20
    assert found["difference"] <= 0.5
