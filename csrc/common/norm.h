// LayerNorm of rows in registers: the limits and work buffers that launchers and callers share.
#pragma once
namespace fastattn::norm {

constexpr int kMaxHidden = 16384;
constexpr int kMaxHiddenDxBias = 8192;         // above, the backward has no dx_bias: registers would spill
constexpr int kSpan = 17;                      // blocks of the backward whose sums the last adds; H100: 264 / 17
constexpr int kMaxBlocks = 2 * kSpan * kSpan;  // of the backward
constexpr int kTickets = 2 * kSpan + 1;        // one for each kSpan blocks, and one for all

// The statistics that the forward computes for the backward: mean (rows,), rstd (rows,), and kTickets zeros. The
// backward counts its blocks with the zeros and leaves them zero. With eps_on_std, ratio (rows,) follows: the factor of
// mean(g * normal) in the backward, (std + eps) / std * hidden / (hidden - 1), or 0 where std is 0. It is stored
// because rstd alone cannot distinguish a std far below eps from 0.

// The rows of `partial` in the backward: one for each block, one for each kSpan blocks.
constexpr int backward_partials(int blocks) { return blocks + (blocks + kSpan - 1) / kSpan; }

}  // namespace fastattn::norm
