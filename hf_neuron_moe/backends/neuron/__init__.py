"""The contract on Trainium: nkilib through native torch-neuronx; imported only when this backend is asked for.

``nki``, ``nkilib`` and ``torch_neuronx`` are imported where they are used, never when a module of this folder is,
except those in ``nki_kernels/``, which hold the kernels and are imported last. Nothing here has run on a device: it
follows the documents of Neuron SDK 2.29 to 2.33.
"""
