"""Saves graphs of tensors as `hotcell.v1.Graphs/Save` takes them, written byte by byte: no client of Python's has to be made."""
import contextlib

import grpc


def varint(number):
    """A number as protobuf writes it."""
    told = bytearray()
    while number > 127:
        told.append(number & 127 | 128)
        number >>= 7
    return bytes(told) + bytes([number])


def number(field, value):
    return varint(field << 3) + varint(value)


def part(field, value):
    """A text, bytes or a message."""
    value = value.encode() if isinstance(value, str) else value
    return varint(field << 3 | 2) + varint(len(value)) + value


def spec(dtype, shape):
    """A TensorSpec, in whose shape None is the symbolic dimension."""
    dims = (number(2, 1) if size is None else number(1, size) for size in shape)
    return part(1, dtype) + b"".join(part(2, dim) for dim in dims)


def layers(rows, width, depth):
    """The Graph of `y = tanh(x @ w)`, applied so often one after another."""
    inputs = [part(1, "x") + part(2, spec("f32", [None, width])), part(1, "w") + part(2, spec("f32", [width, width])) + number(4, 1)]

    def of_node(index):
        return part(2, number(1, index) if index else b"")

    nodes, last = [], number(1, 0)
    for at in range(depth):
        nodes.append(part(1, "matmul") + part(2, last) + part(2, number(1, 1)))
        nodes.append(part(1, "tanh") + part(2, of_node(2 * at)))
        last = of_node(2 * at + 1)
    return number(1, rows) + b"".join(part(2, i) for i in inputs) + b"".join(part(3, n) for n in nodes) + part(4, last)


@contextlib.contextmanager
def saved(cell, name, graph, constants):
    """Within, a graph is served under a name, with one output `y`."""
    head = part(1, name) + part(2, graph) + part(3, "y") + number(4, 1)
    # In pieces, as whoever saves large ones has to send them.
    pieces = [part(1, head), *(part(2, constants[at:at + (1 << 20)]) for at in range(0, len(constants), 1 << 20))]
    with grpc.insecure_channel(f"unix:{cell.socket}", [("grpc.default_authority", "localhost")]) as channel:
        save = channel.stream_unary("/hotcell.v1.Graphs/Save", request_serializer=bytes, response_deserializer=bytes)
        assert part(1, name) in save(iter(pieces), timeout=30)
        try:
            yield name
        finally:
            cell.command("graphs", "forget", name)
