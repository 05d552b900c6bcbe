"""What the text of a compiled program says, on one written for the purpose."""

import pytest

from memcomp.compiling import program

TEXT = """\
HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%start (p: bf16[2,8]) -> bf16[8,8] {
  %p = bf16[2,8]{1,0} parameter(0)
  ROOT %all-gather.1 = bf16[8,8]{1,0} all-gather(%p), channel_id=5, replica_groups=[4,4]<=[16], dimensions={0}, metadata={op_name="jit(step)/gather"}
}

%async_collective_fusion.7 (p: bf16[2,8]) -> bf16[8,8] {
  %p.1 = bf16[2,8]{1,0} parameter(0)
  ROOT %all-gather.2 = bf16[8,8]{1,0} all-gather(%p.1), channel_id=5, replica_groups=[4,4]<=[16], dimensions={0}
}

%all-reduce-scatter.3 (p: f32[16,4]) -> f32[4,4] {
  %p.2 = f32[16,4]{1,0} parameter(0)
  %all-reduce.1 = f32[16,4]{1,0} all-reduce(%p.2), channel_id=6, replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %slice = f32[4,4]{1,0} dynamic-slice(%all-reduce.1)
}

%all-reduce-scatter.4 (p: f32[8,2]) -> f32[2,2] {
  %p.7 = f32[8,2]{1,0} parameter(0)
  %all-reduce.2 = f32[8,2]{1,0} all-reduce(%p.7), channel_id=6, replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %slice.1 = f32[2,2]{1,0} dynamic-slice(%all-reduce.2)
}

%chunk_condition (s: (s32[], f32[4])) -> pred[] {
  %trips = s32[]{:T(128)} constant(32)
  %s = (s32[], f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  ROOT %less = pred[] compare(%i, %trips), direction=LT
}

%chunk_body (s: (s32[], f32[4])) -> (s32[], f32[4]) {
  %s.1 = (s32[], f32[4]{0}) parameter(0)
  %overlapped = bf16[8,8]{1,0} fusion(%w), kind=kOutput, calls=%async_collective_fusion.7
  %all-reduce.9 = (f32[4]{0}, f32[2]{0}) all-reduce(%a, %b), channel_id=9, to_apply=%add
  ROOT %t = (s32[], f32[4]{0}) tuple(%i, %a)
}

%layer_condition (s: (s32[], f32[4])) -> pred[] {
  %layers = s32[]{:T(128)} constant(12)
  %s.2 = (s32[], f32[4]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.2), index=0
  ROOT %less.1 = pred[] compare(%i.1, %layers), direction=LT
}

%unknown_condition (s: (s32[], s32[])) -> pred[] {
  %s.3 = (s32[], s32[]) parameter(0)
  %i.2 = s32[] get-tuple-element(%s.3), index=0
  %n = s32[] get-tuple-element(%s.3), index=1
  ROOT %less.2 = pred[] compare(%i.2, %n), direction=LT
}

%unknown_body (s: (s32[], s32[])) -> (s32[], s32[]) {
  ROOT %s.4 = (s32[], s32[]) parameter(0)
}

%one (p: f32[4]) -> f32[4] {
  %p.3 = f32[4]{0} parameter(0)
  ROOT %kernel.4 = f32[4]{0} custom-call(%p.3), custom_call_target="tpu_custom_call", backend_config={"a":"all-gather("}
}

%other (p: f32[4]) -> f32[4] {
  ROOT %p.4 = f32[4]{0} parameter(0)
}

%layer_body (s: (s32[], f32[4])) -> (s32[], f32[4]) {
  %s.5 = (s32[], f32[4]{0}) parameter(0)
  %gathered = bf16[8,8]{1,0} fusion(%w.1), kind=kCustom, calls=%start
  %chunks = (s32[], f32[4]{0}) while(%s.5), condition=%chunk_condition, body=%chunk_body
  %kernel.3 = f32[4]{0} custom-call(%a.1), custom_call_target="tpu_custom_call"
  %send.1 = (bf16[2,64]{1,0:T(8,128)}, u32[]{:S(2)}, token[]) send(%a.1, %after), channel_id=21, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_reduce_operation="SUM",_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}, metadata={op_name="jit(step)/sum"}
  %recv.1 = (bf16[2,64]{1,0:T(8,128)}, u32[]{:S(2)}, token[]) recv(%after), channel_id=22, is_host_transfer=true, frontend_attributes={_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %send.2 = (f32[4]{0}, u32[]{:S(2)}, token[]) send(%a.1, %after), channel_id=23, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="debug"}
  %chosen = f32[4]{0} conditional(%c, %a.1, %a.1), branch_computations={%one, %other}
  %scattered = f32[4,4]{1,0} fusion(%g), kind=kCustom, calls=%all-reduce-scatter.3
  ROOT %t.1 = (s32[], f32[4]{0}) tuple(%i, %a.1)
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %p.5 = f32[4]{0} parameter(0)
  %layers.1 = (s32[], f32[4]{0}) while(%p.5), condition=%layer_condition, body=%layer_body
  %pages = (s32[], s32[]) while(%p.6), condition=%unknown_condition, body=%unknown_body
  %permuted = (f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%p.5), channel_id=11, source_target_pairs={{0,1}}
  %done = f32[4]{0} collective-permute-done(%permuted)
  %scattered.1 = f32[2,2]{1,0} fusion(%g.1), kind=kCustom, calls=%all-reduce-scatter.4
  ROOT %out = f32[4]{0} get-tuple-element(%layers.1), index=1
}
"""


def by_kind():
  return {c.kind: c for c in program.read(TEXT).collectives}


def test_a_collective_that_overlaps_a_loop_is_one():
  found = by_kind()
  assert len(program.read(TEXT).collectives) == 5 and len(found) == 4
  gather = found["all-gather"]
  assert (gather.executions, gather.loops) == (12, 1)
  assert gather.bytes == 8 * 8 * 2
  assert gather.groups == "[4,4]<=[16]"
  assert gather.source == "jit(step)/gather"


def test_one_in_an_inner_loop_runs_every_trip():
  inner = by_kind()["all-reduce"]
  assert (inner.executions, inner.loops) == (12 * 32, 2)
  assert inner.bytes == 4 * 4 + 2 * 4


def test_reduce_scatters_are_all_reduces_and_slices_that_share_a_channel():
  scatters = [
    (c.executions, c.bytes)
    for c in program.read(TEXT).collectives
    if c.kind == "reduce-scatter"
  ]
  assert sorted(scatters) == [(1, 8 * 2 * 4), (12, 16 * 4 * 4)]


def test_of_a_start_results_alone_count():
  assert by_kind()["collective-permute"].bytes == 16


def test_kernels_of_all_branches_count():
  assert program.read(TEXT).kernels == (program.Kernel("kernel", 24),)


def test_loops_without_a_known_end_are_counted():
  assert program.read(TEXT).unknown_loops == 1


@pytest.mark.parametrize(
  ("shape", "expected"),
  [
    ("f32[]", 4),
    ("bf16[2,3]{1,0:T(8,128)(2,1)S(1)}", 12),
    ("(s32[4]{0}, pred[5], u8[3], f8e4m3fn[2])", 16 + 5 + 3 + 2),
  ],
)
def test_bytes(shape, expected):
  assert program.num_bytes(shape) == expected


def test_a_text_without_entry_is_refused():
  with pytest.raises(ValueError, match="no entry"):
    program.read("HloModule x")
