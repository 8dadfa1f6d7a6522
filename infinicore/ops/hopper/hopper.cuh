// What kernels here have in common: barriers in shared memory, and how a launch overlaps the one before.

using half_t = unsigned short;  // either type of 16 bits
using long_t = unsigned long long;

__device__ unsigned address(const void* shared) { return (unsigned)__cvta_generic_to_shared(shared); }

__device__ void init(long_t& barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(&barrier)), "r"(count));
}

__device__ void arrive(long_t& barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(&barrier)) : "memory");
}

__device__ void arrive_expecting(long_t& barrier, int bytes) {
    const unsigned at = address(&barrier);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}

__device__ void wait(long_t& barrier, int parity) {
    const unsigned at = address(&barrier);
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}"
        :
        : "r"(at), "r"(parity)
        : "memory");
}

__device__ void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;"); }

__device__ long_t read_once() {
    long_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
    return policy;
}

__device__ long_t read_by_all() {
    long_t policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0;" : "=l"(policy));
    return policy;
}

// Bytes that lie in one piece, whose arrival a barrier counts
__device__ void copy(void* to, const void* from, int num_bytes, long_t& barrier, long_t policy) {
    const unsigned target = address(to), at = address(&barrier);
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
        "[%3], %4;"
        :
        : "r"(target), "l"(from), "r"(num_bytes), "r"(at), "l"(policy)
        : "memory");
}

__device__ void share_with_cluster() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Without waiting for what this program wrote
__device__ void wait_for_cluster() {
    asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
}
