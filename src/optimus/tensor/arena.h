// Arena: planned memory. It hands out tensors from one block by bumping an offset and takes them back in stack order
// (Scope). A dry run measures the peak with an unbounded arena; the real run gets exactly that many bytes, so it either
// does not start or does not run out.
//
// With OPTIMUS_DEBUG_ARENA set, every tensor is an allocation of its own and is given back at once, so that memory
// checkers see each access outside of it and each read of what was never written; with the value "nan" it is also
// filled with NaN, so that such a read shows in the results. Far too slow to train with.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "optimus/tensor/device.h"

namespace optimus {

class Arena {
 public:
  static constexpr int64_t kAlignment = 256;

  /// `capacity` < 0: unbounded, for a dry device only.
  Arena(Device& device, std::string name, int64_t capacity);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// Uninitialised. `segment` names the row of the memory table it counts in ("saved: experts"). Throws
  /// std::logic_error when the plan was too small: that is a bug of the plan, not of the run.
  Tensor allocate(DType dtype, Shape shape, std::string_view segment);

  const std::string& name() const { return name_; }
  int64_t used() const { return used_; }
  int64_t peak() const { return peak_; }
  int64_t capacity() const { return capacity_; }
  /// Bytes by segment at the moment of the peak; recorded by dry arenas only.
  const std::map<std::string, int64_t>& peak_segments() const { return peak_segments_; }

  /// Gives back everything allocated since it was made.
  class Scope {
   public:
    explicit Scope(Arena& arena) : arena_(arena), used_(arena.used_), live_(arena.live_.size()) {}
    ~Scope() {
      arena_.used_ = used_;
      arena_.forget(live_);
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Arena& arena_;
    int64_t used_;
    size_t live_;
  };
  /// Gives back everything.
  void reset() {
    used_ = 0;
    forget(0);
  }

 private:
  struct Live {
    std::string segment;
    int64_t bytes;
    void* own;  ///< debug only
  };
  void forget(size_t keep);

  Device& device_;
  std::string name_;
  int64_t capacity_;
  bool dry_, debug_, nan_;
  std::byte* base_ = nullptr;
  int64_t used_ = 0;
  int64_t peak_ = 0;
  std::vector<Live> live_;                     // dry and debug only
  std::map<std::string, int64_t> live_bytes_;  // dry only
  std::map<std::string, int64_t> peak_segments_;
};

}  // namespace optimus
