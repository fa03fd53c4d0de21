"""The training actors: everything that imports megatron.core.

Importing this room makes megatron-core run on the machine at hand, before anything imports it.
"""

from dapo_megatron.megatron import cpu_runtime

cpu_runtime.install()
