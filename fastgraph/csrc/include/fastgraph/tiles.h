// A sparse matrix as tiles: windows of 16 rows, in which the columns that are not empty stand side
// by side, and blocks of eight of these with a bit for each slot, row after row. An edge that is
// there n times has its column n times.
#pragma once

#include <cstdint>

namespace fastgraph {

constexpr int kTileRows = 16;
constexpr int kTileCols = 8;
constexpr int kTileWords = kTileRows * kTileCols / 64;

// Of a head that attention on tiles takes: four packs of 16 bytes in each of four lanes.
constexpr int kMostTileBytes = 256;

struct Tiles {
  const int32_t* col;      // of each packed column; -1 behind the last one of a window
  const uint64_t* bits;    // kTileWords for each block
  const int64_t* first;    // where the entries of each block begin in edge_id, and the last ends
  const int32_t* edge_id;  // of each bit that is set
};

// The same with writable arrays, for the function that fills them.
struct MutableTiles {
  const int64_t* ptr;  // delimits the blocks of each window
  int32_t* col;
  uint64_t* bits;
  int64_t* first;
  int32_t* edge_id;
  int64_t num_blocks;
};

}  // namespace fastgraph
