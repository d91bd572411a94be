"""audit: operators by class, foreign ones, kernels by their names."""

import pytest
import torch
import torch.nn.functional as F

from cute_kernels import audit, declare_invariant, rms_norm
from cute_kernels.invariance.audit import AuditReport, _summing
from cute_kernels.invariance.operators import _declared, treatment_of
from tests.fakes import fake_gpu

BF16 = torch.bfloat16


@pytest.fixture(params=["on a GPU", "on a CPU"])
def place(request):
    if request.param == "on a CPU":
        yield
        return
    with fake_gpu():
        yield


@pytest.mark.filterwarnings("ignore:batch_invariant. there is no CUDA device")
def test_operators_by_class(place):
    """Forward and backward; without a GPU, too."""

    def function(x, weight, index):
        y = F.linear(rms_norm(x, weight[0]), weight)
        loss = y.softmax(-1).square().mean() + y.detach().cumprod(0).sum()
        loss.backward()
        return index.cumprod(0)

    x, weight = torch.randn(8, 16).to(BF16).requires_grad_(), torch.randn(16, 16).to(BF16).requires_grad_()
    report = audit(function, x, weight, torch.arange(4))
    assert not report
    assert report.refused == {"aten.cumprod.default": 1}
    assert {"aten._softmax.default", "aten.mean.default", "aten.sum.default"} <= report.replaced.keys()
    assert report.replaced["aten.mm.default"] >= 2
    assert report.exact["aten.cumprod.default"] >= 1 and report.exact["aten.t.default"] >= 1  # of integers; a view
    assert not report.foreign and report.kernels is None
    assert "refused: 1 calls: aten.cumprod.default (1)" in str(report)


def test_arguments_that_no_kernel_takes():
    x = torch.randn(4, 4)
    with fake_gpu():
        report = audit(lambda: (x @ x, x.double() @ x.double(), x.to(BF16) @ x.to(BF16)))
    assert report.replaced == {"aten.mm.default": 2} and report.refused == {"aten.mm.default": 1}


def test_under_inference_mode():
    """torch hands composites down whole there."""
    x, weight = torch.randn(2, 3, 16).to(BF16), torch.randn(16, 16).to(BF16)

    def function():
        with torch.inference_mode():
            return torch.matmul(F.linear(x, weight), weight)

    with fake_gpu():
        report = audit(function)
    assert report and report.replaced.keys() <= {"aten.mm.default", "aten.bmm.default"}
    assert sum(report.replaced.values()) == 2


def test_a_foreign_operator():
    library = torch.library.Library("of_a_test", "DEF")
    library.define("rotate(Tensor x) -> Tensor")
    library.impl("rotate", lambda x: x + 1, "CPU")
    x = torch.ones(2)
    try:
        report = audit(torch.ops.of_a_test.rotate, x)
        assert not report and report.foreign == {"of_a_test.rotate.default": 1}
        declare_invariant("of_a_test::rotate")
        assert audit(torch.ops.of_a_test.rotate, x)
    finally:
        _declared.clear()
        treatment_of.cache_clear()
        library._destroy()


# fmt: off
KERNELS = {
    "kernel_cutlass_kernel_cute_kernelsnormkernelNormForward_object_at__tensorptrbf16": False,
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3": False,
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy_alignedK_contig<at::native::(anonymous": False,
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MaxOps<float": False,
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<2>, BinaryOpScalarF"
    "unctor<float, 2, 1, 1>, std::multiplies<float>, float>": False,
    "void at::native::_scatter_gather_elementwise_kernel<128, 8, at::native::_cuda_scatter_gather_internal_kernel"
    "<false, float>::operator()<at::native::TensorAssign>": False,
    "Memcpy DtoD (Device -> Device)": False,
    "triton_poi_fused_add_mul_1": False,
    "triton_poi_fused_add_div_sum_4": True,
    "triton_red_fused__to_copy_mul_sum_unsqueeze_0": True,
    "my_hidden_kernel": True,
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<1>, LpNormFunctor<": True,
    "void at::native::_scatter_gather_elementwise_kernel<128, 8, at::native::_cuda_scatter_gather_internal_kernel"
    "<true, float>::operator()<at::native::ReduceAdd>": True,
    "triton_poi_fused_new_zeros_scatter_add_unsqueeze_0": True,
    "triton_poi_fused__softmax_add_exp_mul_select_sub_view_6": True,
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_on_kernel": True,
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, float": True,
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float": True,
    "void dot_kernel<float, 128, 0, cublasDotParams": True,
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::TensorList"
    "Metadata<2>, at::native::(anonymous namespace)::UnaryOpFunctor<float": False,
    "void at::native::radixSortKVInPlace<-2, -1, 128, 32, int, long, unsigned int>(at::cuda::detail::Tens": False,
    "void at_cuda_detail::cub::detail::radix_sort::DeviceRadixSortOnesweepKernel<at_cuda_detail::cub::det": False,
    "void (anonymous namespace)::elementwise_kernel_with_index<int, at::native::arange_cuda_out(c10::Scal": False,
    "kernel_cutlass_kernel_quackrmsnormRMSNorm_object_at__tensorptrbf16": True,
    "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__": True,
    "void vllm::moe::topkGatingSoftmax<8, 128, 4, 16, 32, int, at::BFloat16": True,
    "void gather_gemm<float": True,
    "moe_sorted_gemm_kernel": True,
    "_unrolled_sum": True,
}
# fmt: on


def test_kernels_by_their_names():
    assert set(_summing(KERNELS)) == {name for name, sums in KERNELS.items() if sums}
    assert not AuditReport({}, {}, {}, {}, {}, ("my_hidden_kernel",)) and AuditReport({}, {}, {}, {}, {}, ())


def test_bad_arguments(monkeypatch):
    with pytest.raises(TypeError, match="audit: function must be callable"):
        audit(3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="audit: profile must be False where there is no CUDA device"):
        audit(torch.ones, 1, profile=True)
