"""What stands between the marks of each exercise when it is solved."""
SOLUTIONS = {
    1: '''
def losses_of_parts(token_loss, mask, parts):
    tokens = mask.sum()  # of the whole minibatch, known before any forward
    return [token_loss[rows][mask[rows]].sum() / tokens for rows in parts]
''',
    2: '''
def tokens_with_loss(rows):
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=END)
    lengths = torch.tensor([len(row) for row in rows])
    return ids, torch.arange(ids.shape[1]) < lengths.view(-1, 1)
''',
    3: '''
class Engine:
    def load(self, embedding, head):
        self.embedding, self.head = embedding.clone(), head.clone()
        self.cache = {}  # the states are of the old weights

    def logprobs(self, prompt):
        if tuple(prompt) not in self.cache:
            self.cache[tuple(prompt)] = prefill(self.embedding, prompt)
        return (self.cache[tuple(prompt)] @ self.head).log_softmax(-1)
''',
    4: '''
def kl_loss(logprobs, ref_logprobs):
    return (logprobs - ref_logprobs).square() / 2  # k2: its gradient is (log pi - log ref) grad
''',
    5: '''
def gae(rewards, values, gamma, lam):
    advantages, following, value_after = torch.zeros_like(rewards), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * value_after - values[t]
        advantages[t] = following = delta + gamma * lam * following
        value_after = values[t]
    return advantages
''',
    6: '''
def advantages(rewards, eps=1e-9):
    if rewards.max() == rewards.min():  # exact; the std of equal numbers is not
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std() + eps)
''',
    7: '''
def should_stop(told):
    flag = torch.tensor(int(told))
    td.all_reduce(flag, op=td.ReduceOp.MAX)  # is any rank told?
    return bool(flag)
''',
    8: '''
def score(reward, completions, seconds):
    context, rewards = multiprocessing.get_context("fork"), []
    for text in completions:
        ours, theirs = context.Pipe()
        worker = context.Process(target=lambda text=text, pipe=theirs: pipe.send(reward(text)))
        worker.start()
        rewards.append(ours.recv() if ours.poll(seconds) else None)
        worker.kill()  # a process can be ended, a thread cannot
    return rewards
''',
    9: '''
cause = "the engine samples at a lower temperature"
metric = "rollout/logprob_gap_mean"  # in step 1 already: no update is needed
''',
    10: '''
cause = "the engine's prefix cache is of old weights"
metric = "rollout/logprob_gap_mean"  # nothing in step 1; later the weights moved away
''',
    11: '''
cause = "the KL term has the wrong sign"
metric = "loss/kl"  # below 0, which k3 cannot be
''',
    12: '''
cause = "the reward is high without a right answer"
metric = "reward/exact"  # what is wanted, measured beside what is paid for
''',
    13: '''
cause = "the learning rate is too high"
metric = "policy/entropy"  # nearly uniform: log of the vocabulary is the most that it can be
''',
    14: '''
def clipped_loss(ratio, A, low, high):
    return -torch.minimum(ratio * A, ratio.clamp(1 - low, 1 + high) * A)
''',
    15: '''
def pass_at_k(n, c, k):
    miss = 1.0  # that none of the k is right: they are different samples
    for i in range(k):
        miss *= max(0, n - c - i) / (n - i)
    return 1 - miss
''',
    16: '''
class Stream:
    def __init__(self, rows, seed, position=0):
        self.rows, self.seed, self.position = rows, seed, position

    def next(self):
        epoch, place = divmod(self.position, len(self.rows))
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))
        self.position += 1
        return self.rows[order[place]]
'''}
