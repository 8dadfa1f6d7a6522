// The memory of recordings: slabs cut into regions, one for each tensor that a recording makes. A region goes
// back when the storage of its tensor dies, which is when the last view does, and serves what is made from
// then on.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

namespace infini {

class Slabs {
public:
    struct Place {
        char* begin;
        uint64_t serial;
    };

    Place take(int64_t bytes, uint64_t recording) {
        const int64_t size = (bytes + kAlignment - 1) / kAlignment * kAlignment;
        std::lock_guard lock(mutex_);
        auto hole = smallest_hole(size);
        if (hole == holes_.end()) hole = add_slab(size);
        const auto [begin, room] = *hole;
        holes_.erase(hole);
        if (room > size) holes_[begin + size] = room - size;
        reach(begin + size);
        regions_[begin] = {size, recording, ++last_serial_};
        return {begin, last_serial_};
    }

    // What a tensor leaves, unless its recording had left it already
    void give_back(Place place) {
        std::lock_guard lock(mutex_);
        const auto region = regions_.find(place.begin);
        if (region != regions_.end() && region->second.serial == place.serial) set_free(region);
    }

    // What outlives a recording, its result, is left to the next
    void end(uint64_t recording) {
        std::lock_guard lock(mutex_);
        for (auto region = regions_.begin(); region != regions_.end();)
            region->second.recording == recording ? set_free(region++) : void(++region);
    }

    // Whether the address lies in what this recording made and what still lives
    bool holds(const void* address, uint64_t recording) {
        auto* p = const_cast<char*>(static_cast<const char*>(address));
        std::lock_guard lock(mutex_);
        auto region = regions_.upper_bound(p);
        if (region == regions_.begin()) return false;
        const auto& [begin, found] = *--region;
        return p < begin + found.size && found.recording == recording;
    }

    // How much of them has been in use at some time: of the rest the system has given no page
    int64_t num_bytes() {
        std::lock_guard lock(mutex_);
        return num_bytes_;
    }

private:
    struct Region {
        int64_t size;
        uint64_t recording, serial;
    };
    struct Free {
        void operator()(char* slab) const { ::operator delete(slab, std::align_val_t{kAlignment}); }
    };
    struct Slab {
        std::unique_ptr<char, Free> memory;
        int64_t room, num_reached;
    };
    using Holes = std::map<char*, int64_t>;

    void set_free(std::map<char*, Region>::iterator region) {
        auto hole = holes_.emplace(region->first, region->second.size).first;
        regions_.erase(region);
        if (auto next = std::next(hole); next != holes_.end()) join(hole, next);
        if (hole != holes_.begin()) join(std::prev(hole), hole);
    }

    Holes::iterator smallest_hole(int64_t size) {
        auto best = holes_.end();
        for (auto hole = holes_.begin(); hole != holes_.end(); ++hole)
            if (hole->second >= size && (best == holes_.end() || hole->second < best->second)) best = hole;
        return best;
    }

    Holes::iterator add_slab(int64_t size) {
        const int64_t room = size > kSlabBytes ? size : kSlabBytes;
        auto* memory = static_cast<char*>(::operator new(room, std::align_val_t{kAlignment}));
        slabs_.push_back({std::unique_ptr<char, Free>(memory), room, 0});
        return holes_.emplace(memory, room).first;
    }

    void reach(const char* end) {
        for (Slab& slab : slabs_) {
            const int64_t reached = end - slab.memory.get();
            if (reached <= slab.num_reached || reached > slab.room) continue;
            num_bytes_ += reached - slab.num_reached;
            slab.num_reached = reached;
        }
    }

    void join(Holes::iterator hole, Holes::iterator next) {
        if (hole->first + hole->second != next->first) return;
        hole->second += next->second;
        holes_.erase(next);
    }

    // Holes of one slab join, those of several do not; pages that nothing lies in take no memory.
    static constexpr int64_t kAlignment = 64, kSlabBytes = 64 << 20;
    std::mutex mutex_;
    std::vector<Slab> slabs_;
    Holes holes_;
    std::map<char*, Region> regions_;
    int64_t num_bytes_ = 0;
    uint64_t last_serial_ = 0;
};

}  // namespace infini
