"""A contract double of ``nki``, ``nkilib`` and ``torch_neuronx``, written from their documents alone.

It answers one question: does a caller keep the contract that the documents state? Every call is bound against the
argument list of the release, every documented constraint on shapes, dtypes, ids, scales, grid and memory is checked,
the documented result is computed with this package's own kernels on the CPU, and what the device leaves unwritten holds
NaN. A broken rule is a :class:`~tests.neuron.double.contract.ContractError`.

What it cannot show:

* Device tensors are CPU tensors here: copies between host and device, and the operators that the plugin runs itself,
  are not exercised (``test_fake_device.py`` runs the shapes under a fake ``neuron`` device).
* Kernel bodies run once as plain Python: no compiler restrictions beyond closures, no second core, no memory limits.
* Values follow the documents' arithmetic as this package's kernels implement it; the device's accumulation order and
  activation tables are not known. A misreading of the documents that both sides share stays invisible.
* Argument lists and module paths are those of the public nki-library sources and documents of 2.29 to 2.33; where these
  leave a choice open (which module has a record), the choice made here is one reading. The MXFP8 expert pair takes a
  record since 2.33; ``Double(config_pair=False)`` has the arguments of 2.32 there.
"""
