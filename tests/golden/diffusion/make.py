"""The network of client/examples/diffusion.rs in PyTorch, with the same weights: what its image must be.

image.safetensors: `image` f32 [64, 64, 3], colours in [0, 255] before they are rounded.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.numpy import save_file

STEPS, LATENT, WIDTH, HEADS, BLOCKS, CHANNELS = 20, [1, 4, 8, 8], 64, 4, 3, [32, 32, 24, 16]


class Weights:
    """splitmix64 in [-1, 1), in the order in which they are asked for."""

    def __init__(self, state):
        self.state = state

    def take(self, shape, size):
        count = int(np.prod(shape))
        with np.errstate(over="ignore"):
            z = np.uint64(self.state) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            self.state = int(z[-1])
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = (z ^ (z >> np.uint64(31))) >> np.uint64(40)
        values = (z.astype(np.float32) / np.float32(8388608) - np.float32(1)) * np.float32(size)
        return torch.from_numpy(values.reshape(shape)).double()

    def layer(self, shape):
        size = np.sqrt(np.float32(3) / np.float32(np.prod(shape[1:])))
        return self.take(shape, size), self.take(shape[:1], 0.1)


def network(w):
    blocks = [[w.layer(s) for s in ([6 * WIDTH, WIDTH], [3 * WIDTH, WIDTH], [WIDTH, WIDTH], [4 * WIDTH, WIDTH], [WIDTH, 4 * WIDTH])] for _ in range(BLOCKS)]
    patches, places = w.layer([WIDTH, 16]), w.take([1, 16, WIDTH], 0.5)
    time = w.layer([WIDTH, 32]), w.layer([WIDTH, WIDTH])
    last_modulation, last = w.layer([2 * WIDTH, WIDTH]), w.layer([16, WIDTH])

    def shifted(x, shift, scale):
        return F.layer_norm(x, [WIDTH], eps=1e-6) * (1 + scale) + shift

    def velocity(latent, t):
        x = latent.reshape(1, 4, 4, 2, 4, 2).permute(0, 2, 4, 1, 3, 5).reshape(1, 16, 16)
        x = F.linear(x, *patches) + places
        angles = t * 100 * torch.exp(-np.log(1000) / 16 * torch.arange(16).double())[None]
        e = F.silu(F.linear(F.silu(F.linear(torch.cat([angles.cos(), angles.sin()], -1), *time[0])), *time[1]))
        for modulation, qkv, out, up, down in blocks:
            m = F.linear(e, *modulation).reshape(1, 6, WIDTH).split(1, 1)
            y = F.linear(shifted(x, m[0], m[1]), *qkv).reshape(1, 16, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(*y).transpose(1, 2).reshape(1, 16, WIDTH)
            x = x + m[2] * F.linear(y, *out)
            y = F.linear(F.gelu(F.linear(shifted(x, m[3], m[4]), *up), approximate="tanh"), *down)
            x = x + m[5] * y
        m = F.linear(e, *last_modulation).reshape(1, 2, WIDTH).split(1, 1)
        x = F.linear(shifted(x, *m), *last)
        return x.reshape(1, 4, 4, 4, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(LATENT)

    return velocity


def decoder(w):
    first = w.layer([CHANNELS[0], 4, 3, 3])
    stages = [[w.layer([a, a, 3, 3]), w.layer([a, a, 3, 3]), w.layer([b, a, 3, 3])] for a, b in zip(CHANNELS, CHANNELS[1:])]
    last = w.layer([3, CHANNELS[3], 3, 3])
    conv = lambda x, layer: F.conv2d(x, *layer, padding=1)
    act = lambda x: F.silu(F.group_norm(x, 4, eps=1e-6))

    def image(x):
        x = conv(x, first)
        for one, two, wider in stages:
            x = x + conv(act(conv(act(x), one)), two)
            x = conv(F.interpolate(x, scale_factor=2, mode="nearest"), wider)
        return torch.sigmoid(conv(act(x), last))

    return image


def main():
    w = Weights(20260)
    velocity, image = network(w), decoder(w)
    x = w.take(LATENT, 1.732)
    for i in range(STEPS):
        t = np.float32(1) - np.float32(i) / np.float32(STEPS)
        x = x + velocity(x, float(t)) * float(np.float32(-1) / np.float32(STEPS))
    colours = (image(x)[0].permute(1, 2, 0) * 255).float().numpy()
    print("latent", x.std().item(), "colours", colours.std(axis=(0, 1)), colours.min(), colours.max())
    assert colours.std() > 20 and np.isfinite(colours).all()
    save_file({"image": np.ascontiguousarray(colours)}, Path(__file__).parent / "image.safetensors")


if __name__ == "__main__":
    main()
