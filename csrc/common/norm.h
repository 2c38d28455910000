// LayerNorm of rows in registers: limits and work buffers that its launchers and their callers agree on.
#pragma once
namespace fastattn::norm {

constexpr int kMaxHidden = 16384;
constexpr int kSpan = 16;                      // blocks of the backward whose sums the last of them adds
constexpr int kMaxBlocks = 2 * kSpan * kSpan;  // of the backward
constexpr int kTickets = 2 * kSpan + 1;        // one for each kSpan blocks, and one for all

// How many rows `partial` of the backward has: one of each block, one of each kSpan blocks.
constexpr int backward_partials(int blocks) { return blocks + (blocks + kSpan - 1) / kSpan; }

}  // namespace fastattn::norm
