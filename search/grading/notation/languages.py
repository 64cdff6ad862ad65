"""Words of languages other than English that introduce an answer, explain it, or follow its number.

The English ones stand beside the patterns that read them. To add a language, add an entry here and a line to the tests.
"""

import re
from typing import NamedTuple


class Language(NamedTuple):
    """Words of one language, separated by commas.

    Attributes:
        answer: what an answer is called.
        verbs: what may stand between that and the answer, instead of a colon.
        then: what may follow the verb: therefore, equal to, about.
        reasons: what begins an explanation behind the answer.
        nothing: words at the start of a text that is no answer.
        not_right: words anywhere in a text that denies an answer.
        endings: what may follow the answer in its sentence.
        spaced: whether words are separated by blanks.
        verb_last: whether the answer may follow its name directly.
    """

    answer: str
    verbs: str = ""
    then: str = ""
    reasons: str = ""
    nothing: str = ""
    not_right: str = ""
    endings: str = ""
    spaced: bool = True
    verb_last: bool = False


LANGUAGES = {
    "Arabic": Language(
        "الإجابة, والإجابة, فالإجابة, الاجابة, إجابة, الجواب, جواب, الإجابة النهائية, الجواب النهائي, الإجابة الصحيحة",
        verbs="هي, هو, تساوي, يساوي",
        then="إذن, تقريبا",
        reasons="لأن, حيث, لان",
        nothing="ليست, ليس",
    ),
    "Bengali": Language("উত্তর, চূড়ান্ত উত্তর", verbs="হল, হলো, হচ্ছে", reasons="কারণ", endings="।", verb_last=True),
    "Chinese": Language(
        "答案, 答, 正确选项, 正確選項, 正确的选项, 故选, 故選, 应选, 應選",
        verbs="是, 为, 為, 等于, 等於, 应为, 應為, 应是, 应该是, 應該是, 就是, 选, 選",
        then="约, 約, 大约, 大約, 大概, 约为, 所以, 因此",
        reasons="因为, 因為, 所以, 因此, 其中, 由于, 由於, 即, 也就是",
        nothing="不, 多少, 什么, 什麼, 以下, 如下, 下面, 这, 這, 我们, 我們",
        not_right="不是, 不对, 不對, 错误, 錯誤",
        spaced=False,
    ),
    "Czech": Language("odpověď, konečná odpověď", verbs="je, zní", reasons="protože", nothing="není, ne"),
    "Danish, Norwegian, Swedish": Language(
        "svar, svaret, slutsvar", verbs="er, är, blir, bliver", then="derfor, därför, altså", reasons="fordi, eftersom"
    ),
    "Dutch": Language(
        "antwoord, eindantwoord, uiteindelijke antwoord",
        verbs="is, luidt, wordt",
        then="dus, daarom",
        reasons="omdat, want, aangezien",
        nothing="niet, geen, de, het, een, dat",
    ),
    "Finnish": Language("vastaus, lopullinen vastaus", verbs="on", reasons="koska", nothing="ei"),
    "French": Language(
        "réponse, réponse finale, bonne réponse, réponse correcte, résultat final",
        verbs="est, sera, serait, vaut, est donc",
        then="donc, alors, ainsi, égale à, égal à, environ",
        reasons="car, puisque, parce que, où, étant donné que, donc",
        nothing="pas, non, le, la, les, un, une, que, ce, en, à, de, du, des",
    ),
    "German": Language(
        "Antwort, Endantwort, endgültige Antwort, richtige Antwort, Endergebnis, Schlussantwort",
        verbs="ist, lautet, wäre, beträgt, heißt, wird sein",
        then="also, daher, somit, folglich, deshalb, gleich, etwa, ungefähr",
        reasons="weil, da, denn, wobei, also",
        nothing="nicht, kein, keine, die, der, das, dass, den, ein, eine, in, von, wie",
    ),
    "Greek": Language(
        "απάντηση, τελική απάντηση", verbs="είναι", reasons="διότι, επειδή, γιατί", nothing="δεν, η, ο, το"
    ),
    "Hebrew": Language(
        "תשובה, התשובה, התשובה הסופית, תשובה סופית",
        verbs="היא, הוא, הינה",
        then="לכן",
        reasons="כי, מכיוון",
        nothing="לא",
    ),
    "Hindi": Language(
        "उत्तर, अंतिम उत्तर, सही उत्तर, जवाब, अंतिम जवाब",
        verbs="है, होगा",
        reasons="क्योंकि",
        nothing="नहीं",
        not_right="नहीं",
        endings="है, हैं, होगा, ।",
        verb_last=True,
    ),
    "Hungarian": Language("válasz, a válasz, végső válasz", then="tehát", reasons="mert, mivel", nothing="nem"),
    "Indonesian, Malay": Language(
        "jawaban, jawabannya, jawaban akhir, jawapan",
        verbs="adalah, ialah",
        then="jadi",
        reasons="karena, kerana",
        nothing="bukan, tidak",
    ),
    "Italian": Language(
        "risposta, risposta finale, risposta corretta, risposta esatta, risultato finale",
        verbs="è, sarà, sarebbe, vale",
        then="quindi, dunque, perciò, pari a, circa",
        reasons="perché, poiché, dato che, dove, quindi",
        nothing="non, il, lo, la, i, gli, le, un, una, che, in, di",
    ),
    "Japanese": Language(
        "答え, 答, 解答, 回答, 正解, 最終的な答え, 最終回答, 正しい選択肢",
        verbs="は",
        then="約, およそ, したがって, よって",
        reasons="なぜなら, ので, から, ここで, ただし",
        nothing="以下, 次, 何, どれ",
        not_right="ない, ません",
        endings="です, である, だ, でした, となります, になります, となる, になる, と, なり",
        spaced=False,
    ),
    "Korean": Language(
        "정답, 답, 최종 답, 최종 답안, 답안, 최종 정답, 해답",
        verbs="은, 는, 이, 가",
        then="약, 따라서",
        reasons="왜냐하면, 때문, 이므로, 따라서",
        nothing="다음, 아래, 무엇",
        not_right="아니, 아닙",
        endings="입니다, 이다, 이에요, 예요, 이며, 이 됩니다, 가 됩니다",
        spaced=False,
    ),
    "Persian, Urdu": Language(
        "پاسخ, پاسخ نهایی, جواب, جواب نهایی, حتمی جواب",
        verbs="برابر است با, است",
        reasons="زیرا, چون, کیونکہ",
        endings="است, ہے",
        verb_last=True,
    ),
    "Polish": Language(
        "odpowiedź, ostateczna odpowiedź, prawidłowa odpowiedź, odp., wynik końcowy",
        verbs="to, jest, brzmi, wynosi",
        then="więc, zatem, równa",
        reasons="ponieważ, bo, gdyż",
        nothing="nie",
    ),
    "Portuguese": Language(
        "resposta, resposta final, resposta correta, alternativa correta, resultado final",
        verbs="é, será, seria, vale",
        then="portanto, então, assim, logo, igual a, aproximadamente",
        reasons="porque, pois, já que, uma vez que, onde, portanto",
        nothing="não, o, a, os, as, um, uma, que, em, de",
    ),
    "Romanian": Language(
        "răspuns, răspunsul, răspunsul final, răspunsul corect",
        verbs="este, e",
        then="deci",
        reasons="deoarece, pentru că",
        nothing="nu",
    ),
    "Russian": Language(
        "ответ, ответом, окончательный ответ, правильный ответ, итоговый ответ",
        verbs="есть, будет, равен, является, это",
        then="это, значит, поэтому, примерно, около",
        reasons="потому что, так как, поскольку, ибо, где, ведь",
        nothing="не, что, в, на, такой",
    ),
    "Spanish": Language(
        "respuesta, respuesta final, respuesta correcta, opción correcta, resultado final",
        verbs="es, será, sería, equivale a, vale",
        then="entonces, por lo tanto, por tanto, pues, igual a, aproximadamente",
        reasons="porque, ya que, puesto que, pues, dado que, donde, por lo que",
        nothing="no, el, la, los, las, un, una, que, lo, en, de, al",
    ),
    "Thai": Language(
        "คำตอบ, คำตอบสุดท้าย, ตอบ", verbs="คือ, เท่ากับ, เป็น", reasons="เพราะ, เนื่องจาก", nothing="ไม่", spaced=False
    ),
    "Turkish": Language(
        "cevap, cevabı, yanıt, doğru cevap, doğru yanıt",
        then="olarak",
        reasons="çünkü",
        nothing="değil",
        not_right="değil",
        endings="'tür, 'tır, 'tir, 'tur, 'dür, 'dır, 'dir, 'dur, ’tür, ’tır, ’tir, ’tur, ’dür, ’dır, ’dir, ’dur",
        verb_last=True,
    ),
    "Ukrainian": Language(
        "відповідь, остаточна відповідь, правильна відповідь",
        verbs="є, дорівнює, буде",
        reasons="тому що, оскільки, бо",
        nothing="не",
    ),
    "Vietnamese": Language(
        "đáp án, đáp số, câu trả lời, câu trả lời cuối cùng, đáp án cuối cùng, đáp án đúng",
        verbs="là, bằng",
        then="vậy",
        reasons="vì, bởi vì, do",
        nothing="không",
    ),
}

OPTIONS = """opción, opcion, opção, opcao, opzione, alternativa, Option, Möglichkeit, вариант, варіант, optie, opcja,
seçenek, lựa chọn, 选项, 選項, 選択肢, 번, विकल्प, الخيار"""
"""Words for a choice of a multiple-choice problem; its letter follows."""
ARTICLES = "el, la, los, las, le, les, der, die, das, o, a, il, de, het"
"""Articles before such a name."""

AND_OR = "und, oder, et, ou, и, или, або, og, och, eller, oraz, lub, veya, và, hoặc, atau, και, ή"
"""Conjunctions between two answers that are no English words and no variables."""
AND_OR_UNSPACED = "和, 与, 與, 或, 以及, 或者, 及, と, または, 又は, および, 와, 과, 또는, 및, 그리고"
AND_OR_LETTERS = "y, e, o, u"
"""Conjunctions of one letter, which may be variables."""

SCALES = {
    2: "百 백 सौ",
    3: "千 천 mille mil tausend тысяча тысячи тысяч тыс тис тисяч tys ribu nghìn हजार हज़ार ألف آلاف",
    4: "万 萬 만",
    5: "lakh lakhs लाख",
    6: "millones millón milhões milhão milioni milione Millionen Mio mln миллион миллиона миллионов млн mln juta triệu "
    "milyon مليون",
    7: "crore crores करोड़",
    8: "亿 億 억",
    9: "milliard milliards Milliarde Milliarden Mrd miliardi miliardo миллиард миллиардов млрд mld mrd milyar",
    12: "兆 조 billones трлн",
}
"""Words behind a number by which power of ten it is multiplied."""

PERCENT = """por ciento, pour cent, por cento, per cento, per cent, Prozent, процент, процента, процентов, відсотків,
procent, yüzde, persen, phần trăm, 퍼센트, パーセント, प्रतिशत, بالمئة, بالمائة, في المئة"""

UNITS = {
    "mm": "毫米 ミリメートル 밀리미터 мм миллиметр",
    "cm": "厘米 公分 センチ センチメートル 센티미터 см сантиметр сантиметра сантиметров centímetro centímetros "
    "centimètre centimètres centimetri Zentimeter सेमी",
    "m": "米 公尺 メートル 미터 м метр метра метров metro metros mètre mètres metri Meter मीटर متر",
    "km": "千米 公里 キロメートル 킬로미터 км километр километра километров kilómetro kilómetros quilômetros kilomètre "
    "kilomètres chilometri Kilometer किमी كم",
    "g": "克 グラム 그램 г грамм грамма граммов gramo gramos gramme grammes Gramm ग्राम",
    "kg": "千克 公斤 キログラム キロ 킬로그램 кг килограмм килограммов kilogramo kilogramos Kilogramm किग्रा",
    "s": "秒 초 с сек секунда секунды секунд segundo segundos seconde secondes secondi Sekunde Sekunden ثانية",
    "min": "分钟 分鐘 분 мин минута минуты минут minuto minutos minuti Minute Minuten دقيقة",
    "h": "小时 小時 時間 시간 ч час часа часов hora horas heure heures Stunde Stunden घंटे ساعة ساعات",
    "day": "天 日間 일 день дня дней día días dia dias jour jours giorni giorno Tage Tagen दिन",
    "week": "周 週間 주 неделя недели недель semana semanas semaine semaines Woche Wochen",
    "month": "个月 個月 ヶ月 か月 개월 месяц месяца месяцев mes meses mois Monat Monate",
    "year": "年 岁 歲 歳 才 년 살 год лет año años ano anos année années anni Jahr Jahre वर्ष साल سنة سنوات",
    "l": "升 公升 リットル 리터 л литр литра литров litro litros litres litri Liter",
    "ml": "毫升 ミリリットル 밀리리터 мл",
    "¥": "円 元 块 塊 人民币",
    "$": "美元 美金 ドル 달러 доллар доллара долларов dólar dólares dollari",
    "€": "欧元 歐元 ユーロ 유로 евро",
    "₩": "원",
    "₽": "руб рубль рубля рублей",
    "₹": "रुपये रुपए रुपया",
    "°": "度 도 градус градуса градусов grado grados degré degrés gradi डिग्री",
}
"""Names of units of measure and money; see `units`."""


def listed(phrases: str) -> list[str]:
    """The phrases of a list, the longest first, so that none hides a longer one."""
    return sorted((phrase.strip() for phrase in phrases.split(", ")), key=len, reverse=True) if phrases else []


def any_of(phrases: str) -> str:
    """A pattern of the phrases of a list; a blank in one is any blank."""
    return "|".join(re.escape(phrase).replace(r"\ ", r"\s+") for phrase in listed(phrases.replace("\n", " ")))
