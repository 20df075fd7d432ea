#pragma once
// How a matmul's result is cut into tiles, and which tile comes when.

#include "common/device_cuda.h"
#include "common/dtype.h"

namespace lockstep::ladder {

inline int64_t tiles(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }

// Blocks that run at the same time should share rows of a and columns of b, so that these are read
// from the L2 cache. Tiles are therefore numbered down a group of rows of tiles, then one column
// on:
//
//     0  3  6  9 12 ..  33        group = 3: the first 12 tiles need 3 rows of a and 4 columns of
//     1  4  7 10 13 ..  34        b; numbered along the rows, they would need 1 and 12
//     2  5  8 11 14 ..  35
//
struct TileOrder {
  int rows, columns, group;
  LOCKSTEP_BOTH int count() const { return rows * columns; }
  LOCKSTEP_BOTH void find(int tile, int* row, int* column) const {
    int first = tile / (group * columns) * group, within = tile % (group * columns);
    int height = rows - first < group ? rows - first : group;
    *row = first + within % height;
    *column = within / height;
  }
};

inline int multiprocessors() {
  int index = 0, count = 0;
  check(cudaGetDevice(&index));
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, index));
  return count;
}

}  // namespace lockstep::ladder
