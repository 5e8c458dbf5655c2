// numpy's .npy: magic "\x93NUMPY", version (1.0 has a 2-byte header length, 2.0 and 3.0 a 4-byte one), a Python dict
// {'descr': '<u2', 'fortran_order': False, 'shape': (3, 4), } padded with spaces, then the elements.
// Source: numpy.lib.format, "Format Version 1.0" to "3.0".
#pragma once

#include <span>

#include "optimus/base/file.h"
#include "optimus/data/token_layout.h"

namespace optimus {

/// Whether a file is, or before damage was, a real .npy. OLMo's headerless uint16 files carry the ending but no header;
/// a file whose magic is damaged must not pass for one of those.
bool looks_like_npy(std::span<const std::byte> bytes);

/// Error(kData) unless the file is a whole array of integers, its elements in C order.
TokenLayout read_npy_header(const MappedFile& file);

}  // namespace optimus
