#include "emulator/tma.h"

#include <algorithm>
#include <memory>
#include <stdexcept>

#include "common/launch.cuh"

namespace fastattn::sm90 {

TensorMap make_tensor_map(const TensorLayout& layout) {
  const auto refuse = [](const char* what) { throw std::runtime_error(std::string("emulator: a tensor map ") + what); };
  const uint64_t element = 2, inner = layout.box[0] * element;
  if (!emulator::has_current_context()) refuse("is made by a thread with a current context: no DeviceGuard before it");
  if (reinterpret_cast<uintptr_t>(layout.data) % 16 != 0) refuse("starts at a multiple of 16 bytes");
  for (const uint64_t size : layout.size)
    if (size == 0 || size > uint64_t{1} << 32) refuse("has sizes of 1 to 2^32");
  for (const uint64_t stride : layout.stride)
    if (stride % 16 != 0 || stride >= uint64_t{1} << 40)
      refuse("has strides that are multiples of 16 bytes, below 2^40");
  // cuda.h requires it of every stride; drivers accept less for sizes above 1, such as heads inside rows.
  uint64_t inside = layout.size[0] * element;  // bytes of the dimensions so far
  for (int d = 0; d < 3; inside = std::max(inside, layout.stride[d] * layout.size[d + 1]), d++)
    if ((d == 0 || layout.size[d + 1] == 1) && layout.stride[d] < inside)
      refuse("has strides of lines, and of sizes of 1, that are no less than what the dimensions inside take");
  for (const uint32_t box : layout.box)
    if (box == 0 || box > 256) refuse("has a box of 1 to 256 elements a dimension");
  if (inner != 128) refuse("has lines of 128 bytes in its box");
  return {layout};
}

}  // namespace fastattn::sm90

namespace fastattn::emulator {

int box_bytes(const sm90::TensorMap& map) {
  int bytes = 2;
  for (const uint32_t box : map.layout.box) bytes *= static_cast<int>(box);
  return bytes;
}

void move_box(Direction direction, const sm90::TensorMap& map, size_t offset, unsigned char* box,
              const std::array<int, 4>& corner) {
  const sm90::TensorLayout& layout = map.layout;
  constexpr size_t element = 2;
  Block& block = *Block::current;
  const size_t first = offset;
  std::array<uint64_t, 4> at;  // in the tensor; wraps around below zero, and so is outside
  for (uint32_t i3 = 0; i3 < layout.box[3]; i3++)
    for (uint32_t i2 = 0; i2 < layout.box[2]; i2++)
      for (uint32_t i1 = 0; i1 < layout.box[1]; i1++)
        for (uint32_t i0 = 0; i0 < layout.box[0]; i0++, offset += element) {
          const uint32_t index[4] = {i0, i1, i2, i3};
          bool inside = true;
          for (int d = 0; d < 4; d++) {
            at[d] = static_cast<uint64_t>(int64_t{corner[d]} + index[d]);
            inside = inside && at[d] < layout.size[d];
          }
          const size_t place = swizzle_128(offset);
          unsigned char* const seen = box + place - first;
          if (!inside) {
            if (direction != Direction::load) continue;
            std::memset(seen, 0, element);
            std::memset(block.shared + place, 0, element);
            continue;
          }
          unsigned char* const data = static_cast<unsigned char*>(const_cast<void*>(layout.data)) + at[0] * element +
                                      at[1] * layout.stride[0] + at[2] * layout.stride[1] + at[3] * layout.stride[2];
          if (direction == Direction::load) {
            std::memcpy(seen, data, element);
            std::memcpy(block.shared + place, data, element);
          } else {
            std::memcpy(data, seen, element);
          }
        }
}

namespace {

size_t check_place(const void* shared, int bytes, int alignment, Site site) {
  Block& block = *Block::current;
  const size_t offset = block.shared_offset(shared, bytes, site.what);
  if (offset % alignment != 0)
    block.fail(site.text() + ": its place in shared memory is not at a multiple of " + std::to_string(alignment) +
               " bytes");
  return offset;
}

}  // namespace

void check_bulk(const void* global, int bytes, Site site) {
  if (reinterpret_cast<uintptr_t>(global) % 16 != 0 || bytes % 16 != 0)
    Block::current->fail(site.text() + ": copies whole multiples of 16 bytes at multiples of 16 bytes");
}

void start_load(void* to, int bytes, int alignment, sm90::Barrier& barrier, Site site,
                std::function<void(size_t)> copy) {
  Block& block = barrier.check(site);
  const size_t offset = check_place(to, bytes, alignment, site);
  if (!block.barriers_initialised)
    block.fail(site.text() + ": no fence_barrier_init() since a barrier was initialised");
  block.start([copy = std::move(copy), offset, bytes, &barrier] {
    copy(offset);
    barrier.complete(bytes);
  });
}

void start_store(const void* from, int bytes, int alignment, Site site,
                 std::function<void(unsigned char*, size_t)> write) {
  Block& block = *Block::current;
  const size_t offset = check_place(from, bytes, alignment, site);
  block.check_barrier_after_fence(site);
  const auto source = std::make_shared<std::vector<unsigned char>>(bytes);
  unsigned char* const seen = block.async_view + offset;
  block.start_reading(block.thread->store_reads, [=] { std::memcpy(source->data(), seen, source->size()); });
  block.start_reading(block.thread->stores, [=] { write(source->data(), offset); });
}

}  // namespace fastattn::emulator
