"""load_cache_to_device_buffer_mla over many steps of decode, compared byte for byte with the reference."""

from __future__ import annotations

import pytest
from decode_cases import Decode


@pytest.mark.parametrize("block_size", [256, 512, 960, 1024])
@pytest.mark.parametrize(
    ("num_top_k", "hot_buffer_size", "item_size_bytes"), [(16, 16, 20), (37, 50, 132), (200, 333, 656), (5, 700, 7)]
)
def test_dozens_of_steps(sweep_place, rng, num_top_k, hot_buffer_size, item_size_bytes, block_size):
    decode = Decode(rng, 6, num_top_k, hot_buffer_size, item_size_bytes, int(rng.choice([1, 4])), steps=40)
    for step in range(40):
        decode.hit_rate = (0.95, 0.5, 0.0, 1.0)[step // 10]
        decode.step(sweep_place, block_size=block_size, blocks_per_request=int(rng.integers(1, 5)))


@pytest.mark.parametrize("seed", range(4))
def test_steps_of_random_shape_everywhere(place, rng, seed):
    hot_buffer_size = int(rng.integers(1, 120))
    num_top_k = int(rng.integers(1, hot_buffer_size + 1))
    decode = Decode(rng, 4, num_top_k, hot_buffer_size, int(rng.integers(1, 90)), int(rng.integers(1, 4)), steps=25)
    for _ in range(25):
        decode.hit_rate = rng.random()
        decode.step(place, block_size=int(rng.choice([256, 512, 960, 1024])), skip_io=False)


def test_steps_at_model_size(sweep_place, rng):
    decode = Decode(rng, 3, 2048, 4096, 144, 64, steps=12)
    for _ in range(12):
        decode.step(sweep_place, block_size=1024)
