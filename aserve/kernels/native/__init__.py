"""CPU kernels in C++, compiled once for this processor, and the operations that call them."""
