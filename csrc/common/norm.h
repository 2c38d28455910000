// LayerNorm of rows in registers: limits and work buffers that its launchers and their callers agree on.
#pragma once
namespace fastattn::norm {

constexpr int kMaxHidden = 16384;
constexpr int kSpan = 16;                      // blocks of the backward whose sums the last of them adds
constexpr int kMaxBlocks = 2 * kSpan * kSpan;  // of the backward
constexpr int kTickets = 2 * kSpan + 1;        // one for each kSpan blocks, and one for all

// The statistics that the forward makes for the backward: mean (rows,), rstd (rows,), and kTickets zeros, which the backward
// counts its blocks with and leaves zero. With eps_on_std then ratio (rows,), the factor of mean(g * normal) in the backward:
//   ratio = (std + eps) / std * hidden / (hidden - 1), or 0 where std is 0
// It is stored because rstd alone does not tell a std that is far below eps from 0.

// How many rows `partial` of the backward has: one of each block, one of each kSpan blocks.
constexpr int backward_partials(int blocks) { return blocks + (blocks + kSpan - 1) / kSpan; }

}  // namespace fastattn::norm
