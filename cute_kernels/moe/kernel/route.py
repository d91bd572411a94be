"""Routing, a warp a token: the best experts of its logits, in ascending order, and their weights.

A lane has every 32nd logit. They are compared as integers of the same order, of equal ones that of the lowest expert:

    lanes' largest keys --> the k-th largest of these, a bound --> keys that reach it, a few more than k, in ascending
    expert, one a lane --> rank of each among these --> the k first

Where more than 32 reach it, as equal logits do, k rounds find the largest one after the other. What is computed with
depends on the token's logits and the set of its experts alone, added in one order: lanes' own, then a tree of lanes.
"""

import math
import operator

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from cute_kernels.moe.config import WARP, WARPS, RouteSpec
from cute_kernels.moe.kernel.warp_rows import row_of_warp, symbolic_list, symbolic_table, warp_grid
from jit_cache import Program, compiled

LOG2_E = 1.4426950408889634
LOWEST = -(2**31)  # below the key of every number
MAGNITUDE = 0x7FFFFFFF


class Route:
    """See the builder ``route``."""

    def __init__(self, spec: RouteSpec):
        self.spec = spec
        self.per_lane = -(-spec.num_experts // WARP)

    @cute.jit
    def __call__(self, logits, bias, given, indices, weights, eps: Float32, scale: Float32, stream):
        self.kernel(logits, bias, given, indices, weights, eps, scale).launch(
            grid=warp_grid(logits.shape[0]), block=[WARPS * WARP, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, logits, bias, given, indices, weights, eps: Float32, scale: Float32):
        k = const_expr(self.spec.k)
        token, lane = row_of_warp()
        of_warps = SmemAllocator().allocate_tensor(
            Int32, cute.make_layout((2, WARP, WARPS), stride=(WARP, 1, 2 * WARP)), 16
        )
        candidates = of_warps[None, None, token % WARPS]
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()  # a plan, which may get ready until this has ended
        if token < logits.shape[0]:
            values, has_nan = self.load_logits(logits, token, lane)
            expert = Int32(-1)
            if const_expr(self.spec.replays):
                if lane < k:
                    expert = given[token, lane]
                expert = self.ascending(expert, lane)
            else:
                expert = self.select(values, bias, candidates, lane)
                if has_nan:
                    expert = lane
            weight = self.weights_of(logits, values, token, expert, lane, eps)[0] * scale
            if has_nan:
                weight = Float32(math.nan)
            if lane < k:
                indices[token, lane] = expert
                weights[token, lane] = weight

    @cute.jit
    def load_logits(self, logits, token: Int32, lane: Int32):
        """This lane's logits, -inf beyond the last, and whether any of the token's is NaN."""
        experts = const_expr(self.spec.num_experts)
        values = cute.make_rmem_tensor((self.per_lane,), Float32)
        nan = Boolean(False)
        for s in cutlass.range_constexpr(self.per_lane):
            values[s] = -Float32.inf
            if s * WARP + lane < experts:
                values[s] = logits[token, s * WARP + lane]
            nan = nan | (values[s] != values[s])
        return values, cute.arch.vote_any_sync(nan)

    @cute.jit
    def select(self, values, bias, candidates, lane: Int32) -> Int32:
        """The experts of the k largest scores, ascending, the j-th in lane j."""
        experts = const_expr(self.spec.num_experts)
        keys = cute.make_rmem_tensor((self.per_lane,), Int32)
        for s in cutlass.range_constexpr(self.per_lane):
            score = values[s]
            if const_expr(self.spec.score == "sigmoid"):
                score = sigmoid(score)
            if const_expr(bias is not None):
                score = score + bias[cutlass.min(s * WARP + lane, experts - 1)]
            keys[s] = key_of(score) if s * WARP + lane < experts else Int32(LOWEST)
        if const_expr(self.spec.groups > 1):
            self.keep_groups(keys, lane)
        bound = self.lower_bound(keys)
        count = self.collect(keys, bound, candidates, lane)
        expert = Int32(-1)
        if count <= WARP:
            expert = self.first_of(candidates, count, lane)
        else:
            for j in cutlass.range(self.spec.k, unroll=1):
                found = self.largest(keys, lane)
                self.remove(keys, found, lane)
                if lane == j:
                    expert = found
            expert = self.ascending(expert, lane)
        return expert

    @cute.jit
    def lower_bound(self, keys) -> Int32:
        """A key that k or more reach: the k-th largest of the lanes' largest ones, or below it where some are equal."""
        best = keys[0]
        for s in cutlass.range_constexpr(1, self.per_lane):
            best = cutlass.max(best, keys[s])
        bound = best
        for _ in cutlass.range_constexpr(self.spec.k):
            bound = cute.arch.warp_redux_sync(best, "max")
            if best == bound:
                best = Int32(LOWEST)
        return bound

    @cute.jit
    def collect(self, keys, bound: Int32, candidates, lane: Int32) -> Int32:
        """The number of keys that reach a bound; the first 32 of them, and their experts, ascending."""
        count = Int32(0)
        cute.arch.sync_warp()
        for s in cutlass.range_constexpr(self.per_lane):
            reached = cute.arch.vote_ballot_sync(keys[s] >= bound)
            place = count + cute.arch.popc(reached & cute.arch.lanemask_lt()).to(Int32)
            if keys[s] >= bound and place < WARP:
                candidates[0, place] = keys[s]
                candidates[1, place] = s * WARP + lane
            count += cute.arch.popc(reached).to(Int32)
        cute.arch.sync_warp()
        return count

    @cute.jit
    def first_of(self, candidates, count: Int32, lane: Int32) -> Int32:
        """The experts of the k largest of up to 32 candidates, ascending, the j-th in lane j."""
        key, expert = candidates[0, lane], candidates[1, lane]
        rank = Int32(0)
        for j in cutlass.range(count, unroll=4):
            other = cute.arch.shuffle_sync(key, j)
            if other > key or (other == key and j < lane):
                rank += 1
        chosen = cute.arch.vote_ballot_sync(lane < count and rank < self.spec.k)
        cute.arch.sync_warp()
        if (chosen >> lane) & 1 == 1:
            candidates[1, cute.arch.popc(chosen & cute.arch.lanemask_lt()).to(Int32)] = expert
        cute.arch.sync_warp()
        return candidates[1, lane]

    @cute.jit
    def largest(self, keys, lane: Int32) -> Int32:
        """The expert of the warp's largest key, the lowest of equal ones."""
        best, place = keys[0], Int32(0)
        for s in cutlass.range_constexpr(1, self.per_lane):
            if keys[s] > best:
                best, place = keys[s], Int32(s)
        top = cute.arch.warp_redux_sync(best, "max")
        expert = place * WARP + lane if best == top else Int32(MAGNITUDE)
        return cute.arch.warp_redux_sync(expert, "min")

    @cute.jit
    def remove(self, keys, expert: Int32, lane: Int32):
        """Remove an expert that is chosen: its key becomes the lowest."""
        for s in cutlass.range_constexpr(self.per_lane):
            if s * WARP + lane == expert:
                keys[s] = Int32(LOWEST)

    @cute.jit
    def keep_groups(self, keys, lane: Int32):
        """Keys of the groups whose two best scores come to most; of equal sums the lowest groups'."""
        groups, kept = const_expr(self.spec.groups), const_expr(self.spec.kept_groups)
        size = const_expr(self.spec.num_experts // groups)
        mine = Int32(LOWEST)  # lane g has group g's sum
        for g in cutlass.range_constexpr(groups):
            best, second = Int32(LOWEST), Int32(LOWEST)  # of this lane
            for s in cutlass.range_constexpr(self.per_lane):
                key = keys[s] if (s * WARP + lane) // size == g else Int32(LOWEST)
                second = cutlass.max(second, cutlass.min(best, key))
                best = cutlass.max(best, key)
            one = cute.arch.warp_redux_sync(best, "max")
            total = number_of(one)
            if const_expr(size > 1):
                of_one = cute.arch.vote_ballot_sync(best == one)
                two = cute.arch.warp_redux_sync(second if best == one else best, "max")
                if of_one & (of_one - 1) != 0:  # two lanes have it
                    two = one
                total = total + number_of(two)
            if lane == g:
                mine = key_of(total)
        rank = Int32(0)
        for g in cutlass.range_constexpr(groups):
            other = cute.arch.shuffle_sync(mine, g)
            if other > mine or (other == mine and g < lane):
                rank += 1
        survivors = cute.arch.vote_ballot_sync(rank < kept and lane < groups)
        for s in cutlass.range_constexpr(self.per_lane):
            if (survivors >> ((s * WARP + lane) // size)) & 1 == 0:
                keys[s] = Int32(LOWEST)

    @cute.jit
    def ascending(self, expert: Int32, lane: Int32) -> Int32:
        """The lanes' experts in ascending order."""
        rank = Int32(0)
        for j in cutlass.range_constexpr(self.spec.k):
            other = cute.arch.shuffle_sync(expert, j)
            if other < expert or (other == expert and j < lane):
                rank += 1
        found = expert
        for j in cutlass.range_constexpr(self.spec.k):
            other = cute.arch.shuffle_sync(expert, j)
            if cute.arch.shuffle_sync(rank, j) == lane:
                found = other
        return found

    @cute.jit
    def weights_of(self, logits, values, token: Int32, expert: Int32, lane: Int32, eps: Float32):
        """Return (weight before the scale, score, sum of the chosen scores) of this lane's expert, 0 where it has none.

        Then, for all experts, the largest logit and the reciprocal of the softmax's sum.
        """
        valid = lane < self.spec.k and expert >= 0 and expert < self.spec.num_experts
        logit, inverse, largest = -Float32.inf, Float32(1.0), Float32(0.0)
        if valid:
            logit = logits[token, expert]
        if const_expr(self.spec.score == "sigmoid"):
            score = sigmoid(logit)
        elif const_expr(self.spec.score == "chosen"):
            largest = cute.arch.warp_reduction(logit, cute.arch.fmax)
            score = exp(logit - largest)
        else:
            largest = values[0]
            for s in cutlass.range_constexpr(1, self.per_lane):
                largest = cute.arch.fmax(largest, values[s])
            largest = cute.arch.warp_reduction(largest, cute.arch.fmax)
            total = Float32(0.0)
            for s in cutlass.range_constexpr(self.per_lane):
                total = total + exp(values[s] - largest)
            inverse = 1.0 / cute.arch.warp_reduction(total, operator.add)
            score = exp(logit - largest) * inverse
        score = score if valid else Float32(0.0)
        total = Float32(1.0)
        if const_expr(self.spec.normalize or self.spec.score == "chosen"):
            total = cute.arch.warp_reduction(score, operator.add) + eps
        return score / total, score, total, largest, inverse


class RouteBackward(Route):
    """See the builder ``route_backward``."""

    @cute.jit
    def __call__(self, dweights, logits, indices, dlogits, eps: Float32, scale: Float32, stream):
        self.kernel(dweights, logits, indices, dlogits, eps, scale).launch(
            grid=warp_grid(logits.shape[0]), block=[WARPS * WARP, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, dweights, logits, indices, dlogits, eps: Float32, scale: Float32):
        k, experts = const_expr(self.spec.k), const_expr(self.spec.num_experts)
        token, lane = row_of_warp()
        cute.arch.griddepcontrol_wait()
        if token < logits.shape[0]:
            values, has_nan = self.load_logits(logits, token, lane)
            expert, gradient = Int32(-1), Float32(0.0)
            if lane < k:
                expert, gradient = indices[token, lane], dweights[token, lane] * scale
            weight, score, total, largest, inverse = self.weights_of(logits, values, token, expert, lane, eps)
            valid = expert >= 0 and expert < experts
            gradient = gradient if valid else Float32(0.0)
            # Gradients of the scores, then of the logits: what each chosen one adds, and a share of all of a softmax
            if const_expr(self.spec.normalize or self.spec.score == "chosen"):
                gradient = (gradient - cute.arch.warp_reduction(gradient * weight, operator.add)) / total
            share = Float32(0.0)
            if const_expr(self.spec.score == "sigmoid"):
                gradient = gradient * score * (1.0 - score)
            else:
                gradient = gradient * score
                if const_expr(self.spec.score == "softmax"):
                    share = cute.arch.warp_reduction(gradient, operator.add)
            for s in cutlass.range_constexpr(self.per_lane):
                place, found = s * WARP + lane, Float32(0.0)
                if const_expr(self.spec.score == "softmax"):
                    found = -share * exp(values[s] - largest) * inverse
                for j in cutlass.range_constexpr(k):
                    of_chosen = cute.arch.shuffle_sync(gradient, j)
                    if cute.arch.shuffle_sync(expert, j) == place:
                        found = found + of_chosen
                if has_nan:
                    found = Float32(math.nan)
                if place < experts:
                    dlogits[token, place] = found


@cute.jit
def key_of(score: Float32) -> Int32:
    """An integer of the same order; that of -0 is that of +0."""
    bits = word_of(score + 0.0)
    return bits ^ ((bits >> 31) & MAGNITUDE)


@cute.jit
def number_of(key: Int32) -> Float32:
    """The number of a key."""
    bits = key ^ ((key >> 31) & MAGNITUDE)
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])


def word_of(value: Float32) -> Int32:
    """The bits of a number."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


def exp(x: Float32) -> Float32:
    """e^x."""
    return cute.math.exp2(x * LOG2_E, fastmath=True)


def sigmoid(x: Float32) -> Float32:
    """1 / (1 + e^-x)."""
    return 1.0 / (1.0 + exp(-x))


def _operands(spec: RouteSpec) -> tuple:
    tokens = cute.sym_int()
    table = symbolic_table(Int32, tokens, spec.k), symbolic_table(Float32, tokens, spec.k)
    strides = cute.sym_int64(), 1  # not the 32 bits of a constant: logits can have more than 2^31 elements
    logits = cute.runtime.make_fake_tensor(Float32, (tokens, spec.num_experts), strides, assumed_align=4)
    return logits, *table


@compiled
def route(arch: str, spec: RouteSpec) -> Program:
    """Route logits (T, E): indices (T, k), ascending, and weights (T, k)."""
    logits, indices, weights = _operands(spec)
    return Program(
        Route(spec),
        logits,
        symbolic_list(Float32, spec.num_experts) if spec.has_bias else None,
        indices if spec.replays else None,
        indices,
        weights,
        Float32(1.0),
        Float32(1.0),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


@compiled
def route_backward(arch: str, spec: RouteSpec) -> Program:
    """dlogits (T, E) of dweights (T, k), logits and indices."""
    logits, indices, weights = _operands(spec)
    return Program(
        RouteBackward(spec),
        weights,
        logits,
        indices,
        logits,
        Float32(1.0),
        Float32(1.0),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
