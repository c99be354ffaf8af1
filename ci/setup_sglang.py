#!/usr/bin/env python3
"""Unpacks the release of sglang whose modules tests/test_sglang.py runs, from its wheel, into the toolchains' folder.

    python3 ci/setup_sglang.py

A download of 39 MB. What is there already, stays.
"""

from hisparse_build.matrix import MATRIX
from setup_toolchains import set_up, unpack

if __name__ == "__main__":
    wheels = MATRIX["sglang"]["wheels"]
    set_up("sglang", lambda folder: unpack(wheels, folder, {}), wheels)
