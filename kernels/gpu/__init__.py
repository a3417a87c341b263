"""GPU kernels as one CUDA C++ text, and what the host must know to compile and launch it.

``vector.cu``, ``matrix.cu`` and ``states.cu`` are compiled by NVRTC or hiprtc, once for each `Specialisation`; nothing
here imports CuPy. The tests execute the same text on a CPU.
"""
