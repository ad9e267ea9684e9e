//! Choices of experts, as products take them: one by one, in groups for few rows, and in groups for tiles.

use super::{
    common::Numbers,
    products::NO_FURTHER,
    shim::{Arg, NULL, Shim, reported},
};

/// What comes after the matrices of a launch that has no experts.
pub fn nobody(bad: &mut Vec<u64>) -> [Arg; 6] {
    [NULL, NULL, 0.into(), 0.into(), 0.into(), bad.into()]
}

/// No scales in a launch whose kernel takes some.
pub fn unscaled() -> Arg {
    Arg::words(&[0, 0, 0, 1, 0])
}

/// Some tokens' choices.
pub struct Choices {
    pub ids: Vec<i32>,
    pub experts: usize,
    /// Experts of a token, and rows that it has for them.
    pub used: usize,
    pub per_token: usize,
}

impl Choices {
    /// Choices of three experts by two per token, with one from the end, and the last one of an expert that there is not.
    pub fn of_three(tokens: usize, shared: bool) -> Self {
        let mut random = Numbers::new(tokens as u64);
        let mut ids: Vec<i32> = (0..2 * tokens)
            .map(|_| (random.below(30) / 10) as i32)
            .collect();
        ids[1] = -1;
        ids[2 * tokens - 1] = 3;
        Self {
            ids,
            experts: 3,
            used: 2,
            per_token: if shared { 1 } else { 2 },
        }
    }

    /// Rows of activations.
    pub fn rows(&self) -> usize {
        self.ids.len() / self.used * self.per_token
    }

    /// The activations that a choice's row is of.
    pub fn from(&self, choice: usize) -> usize {
        let own = if self.per_token > 1 {
            choice % self.used
        } else {
            0
        };
        choice / self.used * self.per_token + own
    }

    /// The expert of a choice, if there is one.
    pub fn expert(&self, choice: usize) -> Option<usize> {
        let id = self.ids[choice] as i64;
        let expert = if id < 0 { id + self.experts as i64 } else { id };
        usize::try_from(expert).ok().filter(|e| *e < self.experts)
    }

    /// The numbers of experts as the kernel of these gives them; one that there is not is reported.
    fn numbers(&self, shim: &Shim) -> Vec<i32> {
        let (mut found, mut bad) = (vec![7i32; self.ids.len()], vec![0u64; 2]);
        // The kernels' number of i32.
        let args = [
            Arg::from(7),
            (&mut found).into(),
            (&self.ids).into(),
            Arg::from(self.ids.len() as i64),
            Arg::from(self.experts as i64),
            (&mut bad).into(),
        ];
        shim.launch("experts_of", [2, 1, 1], 256, &args).unwrap();
        let number = |choice| self.expert(choice).map_or(i32::MIN, |e| e as i32);
        let expected: Vec<i32> = (0..self.ids.len()).map(number).collect();
        assert_eq!(found, expected);
        let wrong = (0..self.ids.len()).find(|choice| self.expert(*choice).is_none());
        let told = wrong.map(|choice| (i64::from(self.ids[choice]), self.experts as u64));
        assert_eq!(reported(&bad), told);
        found
    }

    /// As a launch takes them, in groups of `together`, or one by one.
    pub fn taken(&self, shim: &Shim, together: Option<usize>) -> Taken<'_> {
        let found = self.numbers(shim);
        let (ids, order, down) = match together {
            None => (self.ids.clone(), None, self.ids.len()),
            Some(size) => {
                let groups = (found.len() + (size - 1) * (self.experts + 1)) / size;
                let mut order = vec![7i32; groups * size];
                let sizes = [found.len(), self.experts, size, groups];
                let sizes = sizes.map(|n| Arg::from(n as i32));
                let args = [&[(&found).into(), (&mut order).into()], &sizes[..]].concat();
                let grid = [self.experts + 1, 1, 1];
                shim.launch("group_choices", grid, 256, &args).unwrap();
                (found, Some(order), groups)
            }
        };
        Taken {
            choices: self,
            ids,
            order,
            down,
            bad: vec![0; 2],
        }
    }
}

/// See [`Choices::taken`].
pub struct Taken<'a> {
    choices: &'a Choices,
    ids: Vec<i32>,
    order: Option<Vec<i32>>,
    /// Rows or groups, which are blocks of a grid's second axis.
    down: usize,
    bad: Vec<u64>,
}

impl Taken<'_> {
    /// Results `[choices, n]` by a kernel whose blocks have so many outputs and threads. Its arguments begin with weights and
    /// activations, and end with scales where it takes some. Of the wrong expert it tells.
    pub fn products(
        mut self,
        shim: &Shim,
        (kernel, outputs, threads): (&str, usize, usize),
        begin: &[Arg],
        [n, k]: [usize; 2],
        scales: Option<Arg>,
    ) -> Vec<f32> {
        let int = |n: usize| Arg::from(n as i32);
        let count = self.choices.ids.len();
        let mut out = vec![5.0f32; count * n];
        let mut args = begin.to_vec();
        args.extend([(&mut out).into(), Arg::from(n as i64), int(n), int(k)]);
        args.extend([int(count), NO_FURTHER]);
        args.extend(self.arguments());
        args.extend(scales);
        let grid = [n.div_ceil(outputs), self.down, 1];
        shim.launch(kernel, grid, threads, &args).unwrap();
        let wrong = reported(&self.bad).map(|(_, experts)| experts);
        assert_eq!(wrong, Some(self.choices.experts as u64));
        out
    }

    /// What comes after the matrices of a launch.
    fn arguments(&mut self) -> [Arg; 6] {
        let int = |n: usize| Arg::from(n as i32);
        [
            (&self.ids).into(),
            self.order.as_ref().map_or(NULL, Arg::from),
            int(self.choices.experts),
            int(self.choices.used),
            int(self.choices.per_token),
            (&mut self.bad).into(),
        ]
    }
}

#[test]
fn choices_are_grouped_in_ascending_order_of_experts_and_their_own() {
    let Some(shim) = Shim::get() else { return };
    for (count, experts, size) in [
        (1, 1, 4),
        (600, 3, 64),
        (1000, 5, 8),
        (257, 1024, 4),
        (2048, 128, 64),
        (512, 1, 64),
    ] {
        let mut random = Numbers::new(count as u64);
        let ids: Vec<i32> = (0..count)
            .map(|_| random.below(experts + 1) as i32)
            .collect();
        let choices = Choices {
            ids,
            experts,
            used: 1,
            per_token: 1,
        };
        let mut expected = Vec::new();
        for expert in (0..experts).map(Some).chain([None]) {
            expected.extend(
                (0..count)
                    .filter(|choice| choices.expert(*choice) == expert)
                    .map(|choice| choice as i32),
            );
            expected.resize(expected.len().next_multiple_of(size), -1);
        }
        let found = choices.taken(shim, Some(size)).order.unwrap();
        expected.resize(found.len(), -1);
        assert_eq!(found, expected, "{count} choices of {experts} by {size}");
    }
}
