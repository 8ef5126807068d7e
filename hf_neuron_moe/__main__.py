"""``python -m hf_neuron_moe``: the command line."""

from hf_neuron_moe.cli.main import main

if __name__ == "__main__":
    main()
