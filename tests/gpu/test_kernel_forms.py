"""Every form of the GPU kernels runs, with one scale and with scales of heads, and the results of both agree."""

from __future__ import annotations

import pytest

from tests.support.kernel_forms import FORMS, Form, run

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("name", "form"), [(name, form) for name, forms in FORMS.items() for form in forms()])
def test_scales_that_are_all_the_same_are_one_scale(name: str, form: Form) -> None:
    run(name, form)
