"""What the kernel offers to hold a program in, by ctypes and the library alone: it is imported by each sandboxed process."""
