"""Packs the single-op node cases of an onnx wheel into cases.lzma; see README.md.

    pip download onnx==1.22.0 --no-deps --only-binary :all: -d wheel
    python make.py wheel/onnx-1.22.0-*.whl

Only the standard library is used. The same wheel gives the same bytes.
"""

import hashlib
import lzma
import pathlib
import re
import sys
import zipfile

SHA256 = "1d0a2bdb15eb2b3cb65c438f3423d9620d14fdce32f92380e6bb1b2e09568ef5"
ROOT = "onnx/backend/test/data/node/"


def varint(n):
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    out.append(n)
    return bytes(out)


def field(number, data):
    """A length-delimited protobuf field."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def main(path):
    data = pathlib.Path(path).read_bytes()
    if hashlib.sha256(data).hexdigest() != SHA256:
        sys.exit(f"{path} is not the wheel that README.md names")
    cases = {}
    with zipfile.ZipFile(path) as wheel:
        for name in wheel.namelist():
            if name.startswith(ROOT) and name.endswith((".onnx", ".pb")):
                case, *rest = name[len(ROOT) :].split("/")
                if "_expanded" not in case:
                    cases.setdefault(case, {})["/".join(rest)] = wheel.read(name)
    archive = b""
    for case, files in sorted(cases.items()):
        message = field(1, case.encode()) + field(2, files.pop("model.onnx"))
        tensors = []
        for file, content in files.items():
            match = re.fullmatch(r"test_data_set_0/(input|output)_(\d+)\.pb", file)
            kind, index = match.groups()
            tensors.append((3 if kind == "input" else 4, int(index), content))
        for number, _, content in sorted(tensors):
            message += field(number, content)
        archive += field(1, message)
    out = pathlib.Path(__file__).parent / "cases.lzma"
    out.write_bytes(lzma.compress(archive, lzma.FORMAT_ALONE, preset=9 | lzma.PRESET_EXTREME))
    print(f"{len(cases)} cases, {len(archive)} bytes, {out.stat().st_size} packed")


main(sys.argv[1])
