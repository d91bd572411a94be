"""CuTe kernels of layer_norm and rms_norm for SM90 and SM100: forward, backward, and the sum of the partial gradients.

Both directions stream rows the same way. Teams of threads (RowLayout) walk over the rows; each keeps a ring of tiles in
shared memory filled by the bulk-copy engine (RowRing), so that the loads of the next rows are always in flight and cost
no registers; row sums are taken in a fixed order (RowSum). Which thread does what depends on the width alone, never on
the number of rows: a row of y or dx has the same bits in every batch.

Profile: ncu --clock-control none -k regex:Norm python -m bench.bench_norm --filter rms_norm.bwd.8192x4096
"""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from cute_kernels.common.column_sums import ColumnSums, SumRows
from cute_kernels.common.convert import to_fp32
from cute_kernels.common.dtypes import cutlass_dtype
from cute_kernels.common.reduce import RowSum, team_barrier
from cute_kernels.common.row_layout import H200_SMS, SUM_COLUMNS, adds_alone
from cute_kernels.common.row_ring import RowRing
from cute_kernels.common.row_store import RowStore
from cute_kernels.common.rows import (
    both,
    columns_of,
    dot_elements,
    load_columns,
    load_piece,
    load_row,
    piece_of,
    share_columns,
    store_row_values,
    sum_dots,
    sum_elements,
    symbolic_rows,
    symbolic_vector,
    synchronize_cluster,
    thread_coordinates,
    tiles_of_team,
    valid_columns,
)
from cute_kernels.norm.config import NormBackwardSpec, NormConfig, NormForwardSpec
from cute_kernels.norm.kernel_few_rows import FewRowSums, has_own_rows
from jit_cache import Program, compiled


class NormForward:
    """y = (h - mean) * rstd * (weight + weight_offset) + bias with h = x + residual; rstd and mean for the backward.

    gmem --bulk copy--> ring in smem --> registers (fp32): row sums --> y (and h) straight to gmem, or by RowStore. A
    ring slot is free once the first row sum is known, since that took every thread's elements of x and of the residual:
    the next tile is requested there. Weight and bias wait in shared memory, or where they do not fit in L2, so that the
    registers hold rows.
    """

    def __init__(self, kind: str, weight_offset: float, config: NormConfig):
        self.kind = kind
        self.weight_offset = weight_offset
        self.ctas_per_sm = config.ctas_per_sm
        self.shares_columns = config.shares_columns
        self.layout = layout = config.layout
        self.ring = RowRing(layout)
        self.store = RowStore(layout)
        self.row_sum = RowSum(layout, 2)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        residual: Optional[cute.Tensor],
        weight: Optional[cute.Tensor],
        bias: Optional[cute.Tensor],
        y: cute.Tensor,
        h_out: Optional[cute.Tensor],
        statistics: Optional[cute.Tensor],
        eps: Float32,
        num_clusters: Int32,
        stream,
    ):
        layout = self.layout
        self.kernel(x, residual, weight, bias, y, h_out, statistics, eps).launch(
            grid=[num_clusters * layout.cluster, 1, 1],
            block=[layout.threads, 1, 1],
            cluster=[layout.cluster, 1, 1] if const_expr(layout.cluster > 1) else None,
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        residual: Optional[cute.Tensor],
        weight: Optional[cute.Tensor],
        bias: Optional[cute.Tensor],
        y: cute.Tensor,
        h_out: Optional[cute.Tensor],
        statistics: Optional[cute.Tensor],
        eps: Float32,
    ):
        layout = self.layout
        rows, n, pieces = x.shape[0], const_expr(layout.n), const_expr(layout.pieces)
        rank, team, t, row_in_pass, leads = thread_coordinates(layout)
        column = 0 if const_expr(layout.cluster == 1) else rank * layout.columns_per_cta
        streams = [x] if const_expr(residual is None) else [x, residual]

        smem = SmemAllocator()
        tiles, mbars = self.ring.allocate(smem, streams)
        messages, message_mbars = self.row_sum.allocate(smem)
        written = [y, h_out]
        staged = self.store.allocate(smem, written)
        num_tiles, first_tile, step = tiles_of_team(rows, team, layout)
        cute.arch.griddepcontrol_wait()
        # Weight and bias are asked for before the rows: behind the ring's first tiles they would come last
        has_column = valid_columns(column, t, layout)
        columns = [None if const_expr(v is None) else columns_of(v, column, layout) for v in (weight, bias)]
        if const_expr(self.shares_columns):
            loaded = [None if const_expr(v is None) else load_columns(v, t, has_column, layout) for v in columns]
        if leads:
            self.ring.start(streams, tiles, mbars, team, first_tile, step, num_tiles, column)
        self.row_sum.init(message_mbars)
        if const_expr(self.shares_columns):
            columns = [
                None if const_expr(v is None) else share_columns(v, smem, team, t, row_in_pass, has_column, layout)
                for v in loaded
            ]
        synchronize_cluster(layout)

        slot = team * layout.stages
        phase = Int32(0)
        round_index = Int32(0)
        for tile in cutlass.range(first_tile, num_tiles, step):
            cute.arch.mbarrier_wait(mbars + slot, phase)
            tile_h, tile_s, tile_mu = [], [], []
            for j in cutlass.range_constexpr(layout.rows_per_thread):
                tile_row = j * layout.rows_per_pass + row_in_pass
                row = tile * layout.tile_rows + tile_row
                # A row beyond the last one is whatever the slot holds: its sums are its own and nothing of it is stored
                sX = self.ring.row(x, tiles[0], slot, tile_row, row, column)
                rH = load_row(sX, t, has_column, True, layout)
                if const_expr(residual is not None):
                    sR = self.ring.row(residual, tiles[1], slot, tile_row, row, column)
                    rR = load_row(sR, t, has_column, True, layout)
                    for k in cutlass.range_constexpr(len(pieces)):
                        pH = piece_of(rH, pieces[k], layout)
                        # The stored residual is what is normalised: round first
                        h = (pH.load() + piece_of(rR, pieces[k], layout).load()).to(residual.element_type)
                        pH.store(to_fp32(h))
                tile_h.append(rH)
            for j in cutlass.range_constexpr(layout.rows_per_thread):
                row = tile * layout.tile_rows + j * layout.rows_per_pass + row_in_pass
                in_range = True if const_expr(layout.tile_rows == 1) else row < rows
                rH = tile_h[j]
                if const_expr(h_out is not None):
                    self.store.begin(team)
                    for k in cutlass.range_constexpr(len(pieces)):
                        h = piece_of(rH, pieces[k], layout).load().to(h_out.element_type)
                        inside = both(in_range, has_column[k])
                        self.store.piece(h, h_out, staged[1], team, row, column, t, pieces[k], inside)

                mu = Float32(0.0)
                if const_expr(self.kind == "layer" and layout.full):
                    mu, spread = self.moments(rH, messages, message_mbars, team, round_index)
                    round_index += 1
                    self.centre(rH, mu, has_column)
                else:
                    if const_expr(self.kind == "layer"):
                        own = sum_elements(rH, layout)
                        total = self.row_sum.sum((own,), messages, message_mbars, team, round_index)
                        round_index += 1
                        mu = total[0] * (1.0 / n)
                        self.centre(rH, mu, has_column)
                    own_squares = dot_elements(rH, rH, layout)
                    squares = self.row_sum.sum((own_squares,), messages, message_mbars, team, round_index)
                    round_index += 1
                    spread = squares[0]
                s = cute.math.rsqrt(spread * (1.0 / n) + eps)

                if const_expr(j == layout.rows_per_thread - 1):
                    if leads:
                        self.ring.refill(streams, tiles, mbars, slot, tile + layout.stages * step, num_tiles, column)

                tile_s.append(s)
                tile_mu.append(mu)
                if const_expr(h_out is None):
                    self.store.begin(team)
                for k in cutlass.range_constexpr(len(pieces)):
                    h = piece_of(rH, pieces[k], layout).load()
                    factors = (h, cute.full_like(h, s))
                    if const_expr(weight is not None):
                        w = load_piece(columns[0], t, pieces[k], has_column[k], layout)
                        if const_expr(self.weight_offset != 0.0):
                            w = w + self.weight_offset
                        factors = (h * s, w)
                    if const_expr(bias is not None):
                        b = load_piece(columns[1], t, pieces[k], has_column[k], layout)
                        value = cute.math.fma(*factors, b)
                    else:
                        value = factors[0] * factors[1]
                    value = value.to(y.element_type)
                    inside = both(in_range, has_column[k])
                    self.store.piece(value, y, staged[0], team, row, column, t, pieces[k], inside)
                self.store.send(written, staged, team, row, column)
            if rank == 0:
                if const_expr(statistics is not None):
                    values = [tile_s, tile_mu]
                    for i in cutlass.range_constexpr(statistics.shape[0]):
                        store_row_values(values[i], statistics[i, None], tile * layout.tile_rows, rows, layout)
            slot, phase = self.ring.advance(slot, phase, team)
        self.store.finish()

    @cute.jit
    def moments(self, rH, messages, message_mbars, team, round_index):
        """Mean of a row and sum of squared distances from it, in one round of messages.

        Each thread takes the squares about the mean of its own elements. The elements themselves stay as they are:
        h - mean is exact where they are close, (h - own mean) + (own mean - mean) is not.
        """
        layout = self.layout
        count = const_expr(layout.chunks * layout.vec)
        own_mean = sum_elements(rH, layout) * (1.0 / count)
        distances = [piece_of(rH, piece, layout).load() - own_mean for piece in layout.pieces]
        spread = sum_dots([(distance, distance) for distance in distances])
        return self.row_sum.moments(own_mean, spread, count, messages, message_mbars, team, round_index)

    @cute.jit
    def centre(self, rH, mu, has_column):
        """Subtract the mean from the elements inside the row; those beyond its end stay zero."""
        for k in cutlass.range_constexpr(len(self.layout.pieces)):
            if has_column[k]:
                pH = piece_of(rH, self.layout.pieces[k], self.layout)
                pH.store(pH.load() - mu)


class NormBackward:
    """dx, and fp32 partial sums of dw and db, a row a cluster; then one kernel that adds the partials in order.

    gmem --bulk copy--> ring in smem --> registers (fp32): row sums --> dx straight to gmem. dw and db gather in fp32
    registers, the same columns for every row a thread meets, until its last row; then a CTA adds its teams in order.

    With W = weight + weight_offset and D = 1/n the row sums give, for xc = x - mean (rms: x),
        slope = rstd^3 * D * sum(dy W xc),  shift = rstd * D * sum(dy W)  (rms: 0),
        dx = rstd dy W - slope xc - shift,  dw += rstd dy xc,  db += dy,
    three multiplications and three fused multiply-adds an element: at 33M elements the kernel is otherwise bound by
    instructions (H200, 32768x1024 layer_norm: 63.3 us with x_hat formed in both passes, 57.9 us so).
    When the output was saved, x_hat = (y - bias) / W replaces xc * rstd, and sum(dy (y - bias)) needs no division.
    Where W = 0, y - bias is no more than y's rounding, and x_hat counts as 0.
    """

    def __init__(self, kind: str, saved: str, weight_offset: float, accumulate: tuple[bool, bool], config: NormConfig):
        self.kind = kind
        self.saved = saved
        self.weight_offset = weight_offset
        self.ctas_per_sm = config.ctas_per_sm
        self.ahead = config.ahead  # of rows that are read again, one a tile
        self.layout = layout = config.layout
        self.ring = RowRing(layout)
        self.store = RowStore(layout)
        self.num_row_sums = 2 if kind == "layer" else 1
        self.row_sum = RowSum(layout, self.num_row_sums)
        self.column_sums = ColumnSums(layout)
        self.most_rows = config.max_clusters(H200_SMS)
        self.sum_rows = SumRows(accumulate, most_rows=self.most_rows)
        self.few_row_sums = FewRowSums(self.sum_rows)

    @cute.jit
    def __call__(
        self,
        saved: cute.Tensor,
        dy: cute.Tensor,
        dh_out: Optional[cute.Tensor],
        weight: Optional[cute.Tensor],
        bias: Optional[cute.Tensor],
        statistics: cute.Tensor,
        dx: Optional[cute.Tensor],
        dresidual: Optional[cute.Tensor],
        partials: Optional[cute.Tensor],
        dw: Optional[cute.Tensor],
        db: Optional[cute.Tensor],
        eps: Float32,
        num_clusters: Int32,
        stream,
    ):
        operands = (saved, dy, dh_out, weight, bias, statistics, dx, dresidual)
        needs = (dw is not None, db is not None)
        if const_expr(partials is None):
            self.launch(*operands, None, *needs, False, eps, num_clusters, stream)
        elif const_expr(self.may_have_own_rows(partials)):
            if saved.shape[0] <= num_clusters:
                self.launch(*operands, None, False, False, True, eps, num_clusters, stream)
                self.few_row_sums.launch(saved, dy, statistics, partials, dw, db, stream)
            else:
                self.launch(*operands, partials, *needs, False, eps, num_clusters, stream)
                self.sum_rows.launch(partials, dw, db, num_clusters, stream)
        else:
            self.launch(*operands, partials, *needs, False, eps, num_clusters, stream)
            self.sum_rows.launch(partials, dw, db, num_clusters, stream)

    def may_have_own_rows(self, partials: cute.Tensor) -> bool:
        """Whether as few rows as there are clusters have ``FewRowSums`` for dw and db."""
        wide = adds_alone(partials.shape[2], partials.shape[0], self.most_rows)
        return wide and has_own_rows(self.layout, self.saved)

    @cute.jit
    def launch(
        self,
        saved: cute.Tensor,
        dy: cute.Tensor,
        dh_out: Optional[cute.Tensor],
        weight: Optional[cute.Tensor],
        bias: Optional[cute.Tensor],
        statistics: cute.Tensor,
        dx: Optional[cute.Tensor],
        dresidual: Optional[cute.Tensor],
        partials: Optional[cute.Tensor],
        needs_dw: cutlass.Constexpr[bool],
        needs_db: cutlass.Constexpr[bool],
        begins_next: cutlass.Constexpr[bool],
        eps: Float32,
        num_clusters: Int32,
        stream,
    ):
        layout = self.layout
        needs = (needs_dw, needs_db, begins_next)
        self.kernel(saved, dy, dh_out, weight, bias, statistics, dx, dresidual, partials, *needs, eps).launch(
            grid=[num_clusters * layout.cluster, 1, 1],
            block=[layout.threads, 1, 1],
            cluster=[layout.cluster, 1, 1] if const_expr(layout.cluster > 1) else None,
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        saved: cute.Tensor,
        dy: cute.Tensor,
        dh_out: Optional[cute.Tensor],
        weight: Optional[cute.Tensor],
        bias: Optional[cute.Tensor],
        statistics: cute.Tensor,
        dx: Optional[cute.Tensor],
        dresidual: Optional[cute.Tensor],
        partials: Optional[cute.Tensor],
        needs_dw: cutlass.Constexpr[bool],
        needs_db: cutlass.Constexpr[bool],
        begins_next: cutlass.Constexpr[bool],
        eps: Float32,
    ):
        """``begins_next``: the kernel behind needs nothing of this one."""
        layout = self.layout
        rows, n, pieces = saved.shape[0], const_expr(layout.n), const_expr(layout.pieces)
        shape = const_expr((layout.vec, layout.chunks))
        rank, team, t, row_in_pass, leads = thread_coordinates(layout)
        column = 0 if const_expr(layout.cluster == 1) else rank * layout.columns_per_cta
        streams = [saved, dy] if const_expr(dh_out is None) else [saved, dy, dh_out]

        smem = SmemAllocator()
        scratch_bytes = const_expr(self.column_sums.scratch_bytes(needs_dw + needs_db))
        tiles, mbars = self.ring.allocate(smem, streams, scratch_bytes)
        messages, message_mbars = self.row_sum.allocate(smem)
        written = [dx, dresidual]
        staged = self.store.allocate(smem, written)
        num_tiles, first_tile, step = tiles_of_team(rows, team, layout)
        cute.arch.griddepcontrol_wait()
        if const_expr(begins_next):
            cute.arch.griddepcontrol_launch_dependents()
        # The first row's other operands are loaded before its elements
        has_column = valid_columns(column, t, layout)
        rW = None
        if const_expr(weight is not None):
            rW = load_columns(columns_of(weight, column, layout), t, has_column, layout)
        rS, rMu = self.statistics_fragments()
        self.load_statistics(rS, rMu, statistics, first_tile * layout.tile_rows + row_in_pass, rows)
        if leads:
            self.ring.start(streams, tiles, mbars, team, first_tile, step, num_tiles, column)
        self.row_sum.init(message_mbars)
        synchronize_cluster(layout)

        rB = None
        if const_expr(self.saved == "output"):
            if const_expr(bias is not None):
                rB = load_columns(columns_of(bias, column, layout), t, has_column, layout)
            if const_expr(weight is not None):
                rInverse = cute.make_rmem_tensor(shape, Float32)
                for k in cutlass.range_constexpr(layout.chunks):
                    for v in cutlass.range_constexpr(layout.vec):
                        w = Float32(rW[v, k]) + self.weight_offset
                        magnitude = cutlass.max(w, -w, eps)
                        inverse = 1.0 / (magnitude if w >= 0.0 else -magnitude)
                        rInverse[v, k] = inverse if w != 0.0 else Float32(0.0)
        rdW = cute.make_rmem_tensor(shape, Float32)
        rdB = cute.make_rmem_tensor(shape, Float32)
        rdW.fill(0.0)
        rdB.fill(0.0)

        # A matrix that is read again after the row sums, or is not in them, keeps its ring slot until all threads are
        # done with it; else the sums are known when every thread has its elements of both matrices
        late_release = const_expr(layout.reload or dh_out is not None)
        # A row may be summed before the one ahead of it is done: then nobody waits for its messages
        ahead = const_expr(self.ahead)
        slot = team * layout.stages
        phase = Int32(0)
        round_index = Int32(0)
        if const_expr(ahead):
            rOwn = cute.make_rmem_tensor((self.num_row_sums,), Float32)
            if first_tile < num_tiles:
                cute.arch.mbarrier_wait(mbars + slot, phase)
                sX = self.ring.row(saved, tiles[0], slot, 0, first_tile, column)
                sdY = self.ring.row(dy, tiles[1], slot, 0, first_tile, column)
                self.own_sums_of_row(rOwn, sX, sdY, rW, rB, rMu[0], t, has_column)
                self.row_sum.send(self.as_list(rOwn), messages, message_mbars, team, round_index)
            rNextS, rNextMu = self.statistics_fragments()
            self.load_statistics(rNextS, rNextMu, statistics, first_tile + step, rows)
        for tile in cutlass.range(first_tile, num_tiles, step):
            tile_s = [rS[j] for j in range(layout.rows_per_thread)]
            tile_mu = [rMu[j] for j in range(layout.rows_per_thread)]
            next_tile = tile + layout.stages * step
            # Statistics are asked for one tile ahead: a load that misses L2 takes as long as a whole tile
            if const_expr(ahead):
                rS[0], rMu[0] = rNextS[0], rNextMu[0]
                self.load_statistics(rNextS, rNextMu, statistics, tile + 2 * step, rows)
                following = tile + step
                if following < num_tiles:
                    next_slot, next_phase = self.ring.advance(slot, phase, team)
                    cute.arch.mbarrier_wait(mbars + next_slot, next_phase)
                    sX = self.ring.row(saved, tiles[0], next_slot, 0, following, column)
                    sdY = self.ring.row(dy, tiles[1], next_slot, 0, following, column)
                    self.own_sums_of_row(rOwn, sX, sdY, rW, rB, rMu[0], t, has_column)
            else:
                self.load_statistics(rS, rMu, statistics, (tile + step) * layout.tile_rows + row_in_pass, rows)
                cute.arch.mbarrier_wait(mbars + slot, phase)
            for j in cutlass.range_constexpr(layout.rows_per_thread):
                tile_row = j * layout.rows_per_pass + row_in_pass
                row = tile * layout.tile_rows + tile_row
                in_range = True if const_expr(layout.tile_rows == 1) else row < rows
                s = tile_s[j]

                sX = self.ring.row(saved, tiles[0], slot, tile_row, row, column)
                sdY = self.ring.row(dy, tiles[1], slot, tile_row, row, column)
                if const_expr(ahead):
                    sums = self.row_sum.receive(self.num_row_sums, messages, message_mbars, team, round_index)
                    if following < num_tiles:
                        self.row_sum.send(self.as_list(rOwn), messages, message_mbars, team, round_index + 1)
                else:
                    # rX: xc when the input was saved, y - bias when the output was
                    rX = self.centred(load_row(sX, t, has_column, in_range, layout), rB, tile_mu[j])
                    rdY = load_row(sdY, t, has_column, in_range, layout)
                    partial_sums = self.partial_sums(rX, rdY, rW)
                    sums = self.row_sum.sum(partial_sums, messages, message_mbars, team, round_index)
                round_index += 1
                if const_expr(self.saved == "output"):
                    slope = s * (sums[0] * (1.0 / n))
                else:
                    slope = s * (s * (s * (sums[0] * (1.0 / n))))
                shift = Float32(0.0)
                if const_expr(self.kind == "layer"):
                    shift = s * (sums[1] * (1.0 / n))

                if const_expr(dh_out is not None):
                    sdH = self.ring.row(dh_out, tiles[2], slot, tile_row, row, column)
                if const_expr(j == layout.rows_per_thread - 1 and not late_release):
                    if leads:
                        self.ring.refill(streams, tiles, mbars, slot, next_tile, num_tiles, column)

                # Read again piece by piece: all of them would wait at the barrier in registers. No load passes a store
                # to shared memory, so a piece is loaded before the one ahead of it is written, where registers allow
                early = const_expr(int(ahead))
                loaded = []
                if const_expr(layout.reload):
                    loaded = [self.load_pieces(sX, sdY, t, k, both(in_range, has_column[k])) for k in range(early)]
                self.store.begin(team)
                for k in cutlass.range_constexpr(len(pieces)):
                    piece, inside = pieces[k], both(in_range, has_column[k])
                    if const_expr(layout.reload):
                        if const_expr(k + early < len(pieces)):
                            is_in_row = both(in_range, has_column[k + early])
                            loaded = [*loaded, self.load_pieces(sX, sdY, t, k + early, is_in_row)]
                        xc, dy_piece = loaded[k]
                        xc = self.centred_piece(xc, piece, rB, tile_mu[j])
                    else:
                        xc = piece_of(rX, piece, layout).load()
                        dy_piece = piece_of(rdY, piece, layout).load()
                    scaled = dy_piece * s
                    pdW, pdB = piece_of(rdW, piece, layout), piece_of(rdB, piece, layout)
                    if const_expr(self.saved == "output"):
                        if const_expr(weight is not None):
                            xc = xc * piece_of(rInverse, piece, layout).load()
                        if const_expr(needs_dw):
                            pdW.store(cute.math.fma(dy_piece, xc, pdW.load()))
                    elif const_expr(needs_dw):
                        pdW.store(cute.math.fma(scaled, xc, pdW.load()))
                    if const_expr(needs_db):
                        pdB.store(pdB.load() + dy_piece)
                    if const_expr(dx is not None):
                        # Fused by name: of two products the compiler would choose which to round, by what is around
                        # -0 added changes no product; without it the widest fp32 rows spill 8 bytes
                        added = shift if const_expr(self.kind == "layer") else Float32(-0.0)
                        correction = cute.math.fma(xc, cute.full_like(xc, slope), cute.full_like(xc, added))
                        factors = (dy_piece, cute.full_like(dy_piece, s))
                        if const_expr(weight is not None):
                            factors = (scaled, self.offset_weight(rW, piece))
                        dh = cute.math.fma(*factors, -correction)
                        if const_expr(dh_out is not None):
                            dh = dh + load_piece(sdH, t, piece, inside, layout)
                        for i in cutlass.range_constexpr(len(written)):
                            if const_expr(written[i] is not None):
                                value = dh.to(written[i].element_type)
                                self.store.piece(value, written[i], staged[i], team, row, column, t, piece, inside)
                self.store.send(written, staged, team, row, column)
            if const_expr(late_release):
                if const_expr(not layout.staged):
                    team_barrier(layout, team)  # else all met when they had written
                if leads:
                    self.ring.refill(streams, tiles, mbars, slot, next_tile, num_tiles, column)
            slot, phase = self.ring.advance(slot, phase, team)

        self.store.finish()
        if const_expr(partials is not None):
            cute.arch.griddepcontrol_launch_dependents()
            gradients = [rdW] if const_expr(needs_dw) else []
            if const_expr(needs_db):
                gradients = [*gradients, rdB]
            self.column_sums.store(gradients, partials, tiles[0], team, t, column)

    @cute.jit
    def partial_sums(self, rX, rdY, rW):
        """What a thread's elements add to the sums of a row."""
        layout = self.layout
        rG = rdY
        if const_expr(rW is not None):
            rG = cute.make_rmem_tensor((layout.vec, layout.chunks), Float32)
            for k in cutlass.range_constexpr(len(layout.pieces)):
                scaled = piece_of(rdY, layout.pieces[k], layout).load()
                scaled = scaled * self.offset_weight(rW, layout.pieces[k])
                piece_of(rG, layout.pieces[k], layout).store(scaled)
        found = (dot_elements(rdY if const_expr(self.saved == "output") else rG, rX, layout),)
        if const_expr(self.kind == "layer"):
            found = found + (sum_elements(rG, layout),)
        return found

    @cute.jit
    def own_sums_of_row(self, rOwn, sX, sdY, rW, rB, mu, t, has_column):
        """``partial_sums`` of a row in shared memory, added up over a warp."""
        rX = self.centred(load_row(sX, t, has_column, True, self.layout), rB, mu)
        rdY = load_row(sdY, t, has_column, True, self.layout)
        found = self.row_sum.within_warp(self.partial_sums(rX, rdY, rW))
        for i in cutlass.range_constexpr(self.num_row_sums):
            rOwn[i] = found[i]

    def as_list(self, rOwn) -> list:
        return [rOwn[i] for i in range(self.num_row_sums)]

    @cute.jit
    def centred(self, rX, rB, mu):
        """``centred_piece`` of all pieces of a row."""
        for k in cutlass.range_constexpr(len(self.layout.pieces)):
            pX = piece_of(rX, self.layout.pieces[k], self.layout)
            pX.store(self.centred_piece(pX.load(), self.layout.pieces[k], rB, mu))
        return rX

    def load_pieces(self, sX, sdY, t, k: int, inside) -> tuple:
        """The k-th piece of a row of each matrix."""
        return tuple(load_piece(matrix, t, self.layout.pieces[k], inside, self.layout) for matrix in (sX, sdY))

    @cute.jit
    def centred_piece(self, x, piece: cutlass.Constexpr, rB, mu):
        """Saved input: x - mean. Saved output: y - bias."""
        if const_expr(self.kind == "layer" and self.saved == "input"):
            x = x - mu
        if const_expr(rB is not None):
            x = x - piece_of(rB, piece, self.layout).load().to(Float32)
        return x

    @cute.jit
    def offset_weight(self, rW, piece: cutlass.Constexpr):
        """A piece of weight + weight_offset, in fp32: converted where it is used, since rW has half the registers."""
        w = piece_of(rW, piece, self.layout).load().to(Float32)
        if const_expr(self.weight_offset != 0.0):
            w = w + self.weight_offset
        return w

    @cute.jit
    def statistics_fragments(self):
        shape = (self.layout.rows_per_thread,)
        return cute.make_rmem_tensor(shape, Float32), cute.make_rmem_tensor(shape, Float32)

    @cute.jit
    def load_statistics(self, rS, rMu, statistics, row, rows):
        """rstd and mean of a thread's rows of a tile; zero beyond the last row."""
        for j in cutlass.range_constexpr(self.layout.rows_per_thread):
            rS[j] = Float32(0.0)
            rMu[j] = Float32(0.0)
            if row + j * self.layout.rows_per_pass < rows:
                rS[j] = statistics[0, None][row + j * self.layout.rows_per_pass]
                if const_expr(statistics.shape[0] == 2):
                    rMu[j] = statistics[1, None][row + j * self.layout.rows_per_pass]


def symbolic_statistics(count: int, rows):
    """rstd and mean, or rstd alone, of each row: (count, rows), whose offsets may pass 2^31."""
    if count == 0:
        return None
    return cute.runtime.make_fake_tensor(Float32, (count, rows), (cute.sym_int64(), 1), assumed_align=4)


@compiled
def norm_forward(arch: str, spec: NormForwardSpec, config: NormConfig) -> Program:
    """Forward kernel of one width."""
    rows, layout = cute.sym_int(), config.layout
    x, residual, y = (cutlass_dtype(dtype) for dtype in (spec.x, spec.residual, spec.y))
    alignment = 16 if spec.columns_aligned else 0
    return Program(
        NormForward(spec.kind, spec.weight_offset, config),
        symbolic_rows(x, rows, layout),
        symbolic_rows(residual, rows, layout),
        symbolic_vector(cutlass_dtype(spec.weight), layout.n, alignment),
        symbolic_vector(cutlass_dtype(spec.bias), layout.n, alignment),
        symbolic_rows(y, rows, layout, streamed=False),
        symbolic_rows(residual if spec.returns_h else None, rows, layout, streamed=False),
        symbolic_statistics(spec.num_statistics, rows),
        Float32(0.0),
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


@compiled
def norm_backward(arch: str, spec: NormBackwardSpec, config: NormConfig) -> Program:
    """Backward kernels of one width; a gradient whose dtype is None is not computed."""
    rows, partial_rows, layout = cute.sym_int(), cute.sym_int(), config.layout
    alignment = 16 if spec.columns_aligned else 0
    partials = None
    if spec.num_sums:
        columns = -(-layout.n // SUM_COLUMNS) * SUM_COLUMNS
        shape = (spec.num_sums, partial_rows, columns)
        partials = cute.runtime.make_fake_compact_tensor(Float32, shape, stride_order=(2, 1, 0), assumed_align=16)
    return Program(
        NormBackward(spec.kind, spec.save, spec.weight_offset, (spec.accumulate_w, spec.accumulate_b), config),
        symbolic_rows(cutlass_dtype(spec.saved), rows, layout),
        symbolic_rows(cutlass_dtype(spec.dy), rows, layout),
        symbolic_rows(cutlass_dtype(spec.dh_out), rows, layout),
        symbolic_vector(cutlass_dtype(spec.weight), layout.n, alignment),
        symbolic_vector(cutlass_dtype(spec.bias), layout.n, alignment),
        symbolic_statistics(2 if spec.kind == "layer" and spec.save == "input" else 1, rows),
        symbolic_rows(cutlass_dtype(spec.dx), rows, layout, streamed=False),
        symbolic_rows(cutlass_dtype(spec.dresidual), rows, layout, streamed=False),
        partials,
        symbolic_vector(cutlass_dtype(spec.dw), layout.n),
        symbolic_vector(cutlass_dtype(spec.db), layout.n),
        Float32(0.0),
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
