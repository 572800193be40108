"""What a kernel loads and stores at once."""

import triton.language as tl

# By the bytes of an access; one of 16 is two elements side by side
ELEMENTS = {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
