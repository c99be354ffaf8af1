"""What the compilers made of the kernels: disassembly of the shipped device code, the rules it must keep, and the table
and cost model in docs/isa.md."""
